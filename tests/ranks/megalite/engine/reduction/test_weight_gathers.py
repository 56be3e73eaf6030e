"""The gathers of new weights beside the next forward: their order, who waits for them, what a missing wait would show.

Here a gather moves nothing until somebody waits for it, so that a weight that is read too early is a stale one for
certain. The reference waits for all behind each step, as DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.engine import Engine
from megalite.engine.reduction.weight_gathers import WeightGathers
from megalite.engine.step_decision import StepDecision
from megalite.parallel.collectives import ALL_GATHER
from megalite.tracing.activity import Operation
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks

Events = list[tuple[str, set[int]]]  # what happens to which buckets


def _put_off(engine: Engine) -> Events:
    """Puts off the gathers of weights. Returns the list of what happens: gathers begin, are waited for, and layers run
    that have weights in their buckets."""
    events: Events = []
    original, gathers = getattr(dist, ALL_GATHER), engine.gathers
    assert gathers is not None

    def gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        if group is not engine.data_parallel_group() or not async_op:
            return original(whole, own, group=group, async_op=async_op)
        number = 1 + sum(name == "begin" for name, _ in events)
        events.append(("begin", {number}))

        @torch.no_grad()
        def wait() -> None:
            now = engine.activity.now
            assert (now.operation, now.micro_batch) == (Operation.GATHER_WEIGHTS, number) and len(now.peers) == 2, now
            events.append(("wait", {number}))
            original(whole, own, group=group)

        return SimpleNamespace(wait=wait)

    def note(layer: nn.Module, _: object) -> None:
        events.append(("layer", {gathers._number_of[p] for p in layer.parameters() if p in gathers._number_of}))

    setattr(dist, ALL_GATHER, gather)
    for layer in engine.deepspeed.module.modules():
        if hasattr(layer, "layer_name"):
            layer.register_forward_pre_hook(note)
    return events


def _trained(rank: int, cases: list[Case], plant: Callable[[], None] | None, puts_off: bool) -> list[Any]:
    """Of each case its numbers (losses, those of evaluations behind a step, weights), what happened in the last step
    and the evaluation behind it, and the number of buckets. The second step is refused."""
    if plant is not None:
        plant()
    original, seen = getattr(dist, ALL_GATHER), []
    for case in cases:
        engine, answers, numbers = engine_of(case), iter([True, False, True, True]), list[Any]()
        gate = SimpleNamespace(waits=True, takes=lambda _, answers=answers: next(answers), examine=lambda: None)
        assert engine.gathers is not None
        events = _put_off(engine) if puts_off else []
        for index, batch in enumerate(global_batches(case)):
            mine = micro_batches_of(engine, case, batch)
            events.clear()
            numbers.append(float(engine.train_step(mine, case.learning_rate, gate).loss))
            if not puts_off:
                engine.gathers.settle()
            if index != case.steps - 2:  # the last step's forward is the first to wait for the step before
                numbers.append(float(engine.evaluate(mine, case.accumulation)))
        happened = list(events)
        numbers += [parameter.detach().flatten().tolist() for _, parameter in engine.parameters()]
        seen.append((numbers, happened, len(engine.torch_optimizer.param_groups)))
        engine.deepspeed.destroy()
        setattr(dist, ALL_GATHER, original)
    return seen


TIED = {"tie_word_embeddings": True}
CASES = {
    2: [
        Case(dp=2, steps=4, bucket=3000, accumulation=2, dtype="bf16"),
        Case(dp=2, steps=4, bucket=3000, zero=2, recompute="full", model=TIED),
        Case(dp=2, steps=4, bucket=3000, zero=2, accumulation=2, dtype="bf16", optimizer="muon"),
    ],
    4: [
        Case(pp=2, dp=2, steps=4, bucket=3000, accumulation=2, model=TIED),
        Case(pp=2, dp=2, steps=4, bucket=3000, zero=2, accumulation=4, schedule="zb-v", dtype="bf16", model=TIED),
        Case(tp=2, dp=2, steps=4, bucket=3000, dtype="bf16", sequence_parallel=True, sequence=34),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_layers_wait_for_their_own_weights_alone_in_the_order_in_which_gathers_began(ranks: int) -> None:
    expected = run_fresh_ranks(_trained, ranks, CASES[ranks], None, False)
    for rank, found in enumerate(run_fresh_ranks(_trained, ranks, CASES[ranks], None, True)):
        for case, at_once, (numbers, events, buckets) in zip(CASES[ranks], expected[rank], found, strict=True):
            assert numbers == at_once[0], f"{case}: not the numbers of gathers that nothing goes on beside"
            begun, waits = ([next(iter(what)) for name, what in events if name == kind] for kind in ("begin", "wait"))
            before, behind = waits[:-buckets], waits[-buckets:]  # this step's forward, and the evaluation
            assert begun == behind == [*range(1, buckets + 1)] and buckets > 3, f"{case}: {begun}, {behind}"
            assert before == begun[-len(before) :] and len(before) >= buckets - 1, f"{case}: {before}"  # 1 may be tied
            pending, waited = set(before), set[int]()
            for name, what in events:
                if name == "begin":
                    pending |= what
                elif name == "wait":
                    pending, waited = pending - what, waited | what
                else:
                    assert waited <= what, f"{case}: a layer waited for buckets {waited - what} of others"
                    assert not what & pending, f"{case}: a layer ran before its weights were whole"
                    waited = set()


def _layers_do_not_wait() -> None:
    settle = WeightGathers.settle
    WeightGathers.settle = lambda self, weights=None: settle(self) if weights is None else None  # type: ignore[method-assign]


def _a_skip_leaves_out_the_gathers_of_the_next_step() -> None:
    after_step, decisions = WeightGathers.after_step, [SimpleNamespace(left_out=False)]

    def late(self: WeightGathers, decision: StepDecision) -> None:
        decisions.append(SimpleNamespace(left_out=decision.left_out))
        after_step(self, decisions[-2])  # type: ignore[arg-type]

    WeightGathers.after_step = late  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [_layers_do_not_wait, _a_skip_leaves_out_the_gathers_of_the_next_step])
def test_a_stale_weight_shows(plant: Callable[[], None]) -> None:
    cases = [Case(dp=2, steps=4, bucket=3000)]
    expected, found = (run_fresh_ranks(_trained, 2, cases, each, True)[0][0][0] for each in (None, plant))
    assert found != expected
