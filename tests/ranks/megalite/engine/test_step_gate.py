"""A step that is not taken leaves no trace: weights, moments, step count and what comes after, to the bit.

Not taken is what is not finite, wherever it began, and what a judge refuses.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import megalite.engine.stages as stages
from megalite.config.rules.pipeline import FOLDED
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import moment_names, optimizer_step_count, read_parameter
from megalite.engine.step_result import StepResult
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.planting import another_loss
from tests.helpers.rank_pool import run_ranks

INF = float("inf")


class Answers:
    """A judge with answers from a list; notes what it was told."""

    def __init__(self, answers: list[bool], *, waits: bool = True) -> None:
        self.answers, self.losses, self.examined, self.waits = answers, [], 0, waits

    def takes(self, loss: Callable[[], float]) -> bool:
        self.losses.append(loss())
        return self.answers.pop(0)

    def examine(self) -> None:
        self.examined += 1


def _step(engine: Engine, case: Case, index: int, judge: Answers | None = None) -> StepResult:
    return engine.train_step(
        micro_batches_of(engine, case, global_batches(case)[index]), case.learning_rate / (index + 1), judge
    )


def _numbers(engine: Engine) -> list[Any]:
    """All fp32 weights and moments, and the optimizer's step count."""
    moments = moment_names(engine)
    whole = [read_parameter(parameter, moments) for _, parameter in engine.parameters()]
    compute = [parameter.detach().clone() for _, parameter in engine.parameters()]
    return [*[tensor for tensors in whole for tensor in tensors.values()], *compute, optimizer_step_count(engine)]


def _equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def _poison(rank: int, engine: Engine, case: Case, kind: str) -> Callable[[], None]:
    """Spoils one number on the last rank, in its last micro-batch; returns how to stop that. The loss of a model that
    comes back through the stages is on the first one."""
    comes_back = kind.endswith("loss") and case.schedule in FOLDED
    if rank != (0 if comes_back else case.world_size - 1):
        return lambda: None
    if kind.endswith("loss"):
        original, calls = stages.head_loss, iter(range(100))

        def head_loss(*arguments: Any) -> Tensor:
            # added, so that the gradient is none the worse for it
            return original(*arguments) + (float(kind.split()[0]) if next(calls) == case.accumulation - 1 else 0.0)

        stages.head_loss = head_loss
        return lambda: setattr(stages, "head_loss", original)
    *_, (_, parameter) = engine.parameters()
    calls = iter(range(100))

    def spoil(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        if next(calls) == case.accumulation - 1:
            spoiled.view(-1)[0] = float(kind.split()[0])
        return spoiled

    return parameter.register_hook(spoil).remove


KINDS = ("nan loss", "inf loss", "nan gradient", "-inf gradient")
POISONS = list(itertools.product(KINDS, (True, False)))  # with a judge that waits, and with one that does not


def _spoiled_steps(rank: int, engine: Engine, case: Case, poisons: list[tuple[str, bool]]) -> dict[str, dict[str, Any]]:
    """For each poison what a step with it left behind."""
    seen, before = {}, _numbers(engine)
    for kind, waits in poisons:
        stop, judge = _poison(rank, engine, case, kind), Answers([True], waits=waits)
        result = _step(engine, case, 1, judge)
        stop()
        is_late = engine.decision.is_late(judge)
        held = _step(engine, case, 2, judge) if is_late else result  # begun before anybody knew
        engine.decision.allow_updates()
        seen[f"{kind} {'late' * is_late}"] = {
            "result": (result.skipped, result.refused, result.taken),
            "held": held.taken,
            "norm": float(result.grad_norm),
            "loss_is_finite": math.isfinite(float(result.loss)),
            "unmoved": _equal(_numbers(engine), before),
            "examined": judge.examined + is_late,
        }
    return seen


def _refused_steps(engine: Engine, undisturbed: Engine, case: Case) -> dict[str, Any]:
    """Batches 2 and 1 refused, 0 and 3 taken; beside it a run that never saw 1 and 2."""
    judge, results, unmoved = Answers([False, True, False, True]), [], []
    for index in (2, 0, 1, 3):
        before = _numbers(engine)
        results.append(_step(engine, case, index, judge))
        unmoved.append(_equal(_numbers(engine), before))
    agreeable = Answers([True, True])
    others = [_step(undisturbed, case, index, agreeable) for index in (0, 3)]
    return {
        "unmoved": unmoved,
        "flags": [(result.refused, result.skipped, result.taken) for result in results],
        "judged": judge.losses,
        "examined": judge.examined,
        "losses": [float(result.loss) for result in results],
        "norms": [float(result.grad_norm) for result in results],
        "others": [(float(other.loss), float(other.grad_norm)) for other in others],
        "equal": _equal(_numbers(engine), _numbers(undisturbed)),
        "count": optimizer_step_count(engine),
    }


def _steps_not_taken(
    rank: int, cases: list[Case], is_exhaustive: bool
) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Each case with each kind of poison and each judge: one rank, and a case alone, with all pairs of them; of cases
    that reduce and keep gradients alike, one after the other with half each."""
    seen = []
    kinds: Counter[tuple[Any, ...]] = Counter()
    for case in cases:
        is_whole = is_exhaustive or case.world_size == 1 or len(cases) == 1
        kind = (case.zero, bool(case.offload))
        half = [poison for place, poison in enumerate(POISONS) if (place // 2 + place + kinds[kind]) % 2 == 0]
        kinds[kind] += 1
        engine, undisturbed = engine_of(case), engine_of(case)
        with another_loss(engine.coordinate.tensor_rank):
            refused = _refused_steps(engine, undisturbed, case)
        spoiled = _spoiled_steps(rank, engine, case, POISONS if is_whole else half)
        after = [_step(one, case, 1) for one in (engine, undisturbed)]
        refused["after"] = [(float(result.loss), float(result.grad_norm)) for result in after]
        seen.append((refused, spoiled))
        engine.deepspeed.destroy()
        undisturbed.deepspeed.destroy()
    return seen


ONE_STAGE = [
    Case(tp=2, steps=4),
    Case(dp=2, zero=1, accumulation=2, steps=4, bucket=3000),
    Case(dp=2, zero=1, dtype="bf16", accumulation=2, steps=4),
    Case(dp=2, zero=2, accumulation=2, steps=4),
    Case(dp=2, zero=3, steps=4),
    Case(dp=2, accumulation=2, steps=4, offload={"optimizer": "cpu", "activations": "cpu"}),
    Case(dp=2, zero=3, dtype="bf16", steps=4),
]
# what messages leave out is told later, but for those of a step that is not taken
COMPRESSED = [
    Case(dp=2, accumulation=2, steps=4, bucket=3000, compression={"gradients": "int8"}),
    Case(dp=2, dtype="bf16", steps=4, compression={"gradients": "int4", "weights": "int8"}),
    Case(dp=2, accumulation=2, steps=4, bucket=3000, compression={"weights": "int8"}),
    Case(dp=2, dtype="bf16", steps=4, bucket=3000, compression={"gradients": "top_k", "density": 0.1}),
]
TWO_STAGES = [
    Case(pp=2, accumulation=2, model={"tie_word_embeddings": True}, steps=4),
    Case(pp=2, dtype="bf16", accumulation=2, steps=4),
    Case(pp=2, accumulation=2, schedule="interleaved", steps=4),
    Case(pp=2, accumulation=3, schedule="zero-bubble", zero=2, model={"tie_word_embeddings": True}, steps=4),
    Case(pp=2, accumulation=2, schedule="zb-v", dtype="bf16", model={"tie_word_embeddings": True}, steps=4),
    Case(pp=2, accumulation=4, micro_batch=1, schedule="dualpipev", zero=2, steps=4),
]
MORE_REPLICAS = [
    Case(dp=2, zero=2, dtype="bf16", steps=4),
    *(Case(dp=2, zero=zero, accumulation=2, steps=4, offload={"optimizer": "cpu"}) for zero in (2, 3)),
]


SERIAL = [Case(steps=4)]
THREE_DIMENSIONS = Case(tp=2, pp=2, dp=2, accumulation=2, steps=4)


@pytest.mark.parametrize(
    "cases",
    [
        SERIAL,
        ONE_STAGE,
        COMPRESSED,
        TWO_STAGES,
        [THREE_DIMENSIONS],
        pytest.param(MORE_REPLICAS, marks=pytest.mark.exhaustive),
        pytest.param([replace(THREE_DIMENSIONS, dtype="bf16")], marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_that_is_not_taken_leaves_no_trace(cases: list[Case], pytestconfig: pytest.Config) -> None:
    ranks = run_ranks(_steps_not_taken, cases[0].world_size, cases, pytestconfig.getoption("--exhaustive"))
    for index, case in enumerate(cases):
        for rank, (refused, spoiled) in enumerate(answers[index] for answers in ranks):
            _check_refused(refused, f"{case} rank {rank}")
            assert refused["judged"] == ranks[0][index][0]["judged"], f"{case}: ranks judge by different losses"
            for kind, found in spoiled.items():
                _check_spoiled(found, case, kind, f"{case} rank {rank} {kind}")


def _check_refused(seen: dict[str, Any], where: str) -> None:
    refused, taken = (True, False, False), (False, False, True)
    assert seen["flags"] == [refused, taken, refused, taken], where
    assert seen["unmoved"] == [True, False, True, False], f"{where}: a refused step changed weights or moments"
    assert seen["examined"] == 2, where
    assert seen["judged"] == seen["losses"], f"{where}: judged by another loss than the one returned"
    assert [norm == INF for norm in seen["norms"]] == [True, False, True, False], where
    assert list(zip(seen["losses"], seen["norms"], strict=True))[1::2] == seen["others"], f"{where}: it left a trace"
    assert seen["equal"] and seen["count"] == 2, f"{where}: a refused step left a trace"
    assert seen["after"][0] == seen["after"][1], f"{where}: steps that were not finite left a trace"


def _check_spoiled(found: dict[str, Any], case: Case, kind: str, where: str) -> None:
    """An infinite loss has finite gradients here: it must be caught none the less, though nobody waits for the loss."""
    assert found["result"] == (True, False, False), where
    assert found["norm"] == INF and found["unmoved"], where
    assert not found["held"], f"{where}: the next step changed what has to be examined first"
    assert found["examined"] == 1, f"{where}: the judge was not shown the gradients"
    if "gradient" in kind or case.tp == 1:  # each tensor-parallel rank returns its own loss
        assert found["loss_is_finite"] == ("gradient" in kind), where
