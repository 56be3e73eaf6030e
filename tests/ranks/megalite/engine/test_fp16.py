"""fp16's loss scale is once in the gradients that stages of a pipeline hand over, also in those of a tied head, and in
those that replicas sum; norm and update are without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.engine.deepspeed.internals import resident_weights
from megalite.engine.deepspeed.loss_scale import loss_scaler_state
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import moment_names, optimizer_step_count, read_parameter
from tests.helpers.engine_cases import Case, assemble, engine_of, global_batches, local_weights, micro_batches_of
from tests.helpers.planting import Plant, planted
from tests.helpers.rank_pool import run_ranks

MOST_STEPS = 40  # a scale of 2^26 has fallen to 1 by then
TIED = {"tie_word_embeddings": True}


def _fp16_steps(rank: int, case: Case) -> dict[str, Any]:
    engine = engine_of(case)
    flags, unmoved, norms, taken = [], [], [], 0
    batches = global_batches(case)
    while taken < case.steps and len(flags) < MOST_STEPS:
        before = _weights(engine)
        result = engine.train_step(micro_batches_of(engine, case, batches[taken]), case.learning_rate)
        flags.append(result.taken)
        unmoved.append(all(torch.equal(a, b) for a, b in zip(before, _weights(engine), strict=True)))
        norms += [float(result.grad_norm)] * result.taken
        taken += result.taken
    return {"flags": flags, "unmoved": unmoved, "norms": norms, "weights": local_weights(engine)}


def _weights(engine: Engine) -> list[Tensor]:
    """What this rank computes with, its copy of a tied weight too."""
    tied = [] if engine.tied_weight is None else [engine.tied_weight.weight]
    return [tensor.clone() for tensor in [*(resident_weights(p) for _, p in engine.parameters()), *tied]]


TOO_LARGE, SMALL = ({"initial_scale_power": power, "hysteresis": 1} for power in (26, 8))
FP16: dict[str, Any] = {
    "dtype": "fp16",
    "fp16": TOO_LARGE,
    "accumulation": 2,
    "model": TIED,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "steps": 3,
}


# every token goes to all experts: rounding would decide to which of them
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 30, "model_type": "qwen3_moe"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, schedule="zero-bubble", **FP16),
        Case(dp=2, bucket=3000, reduction="fp16", clipping=0.5, **FP16),
        Case(dp=2, zero=3, clipping=0.5, **FP16),
        Case(dp=2, offload={"optimizer": "cpu"}, clipping=0.5, **FP16),
        Case(tp=2, router={"sequence_loss": 0.1, "z_loss": 0.1}, **FP16 | {"model": EXPERTS}),
        Case(dp=2, ep=2, zero=2, clipping=0.5, **FP16 | {"model": EXPERTS}),
        Case(dp=2, adapter={"name": "lora", "rank": 3, "alpha": 7.0}, **FP16 | {"model": {}}),
    ],
    ids=["pipeline", "replicas", "ZeRO-3", "offload", "experts", "dealt experts", "adapters"],
)
def test_fp16_with_a_scale_that_is_too_large_at_first(case: Case) -> None:
    """The steps that overflow change nothing, and what follows is training in fp32 but for fp16's rounding.

    SGD, so that a gradient's scale shows: weights move by 1e-2, and 2% of the largest change is what fp16 may lose.
    """
    halves = run_ranks(_fp16_steps, 2, case)
    plain = {"zero": 1, "schedule": "1f1b", "offload": {}, "dtype": "fp32", "fp16": {}, "reduction": None}
    serial = replace(case, tp=1, pp=1, dp=1, ep=1, global_batch=case.batch, **plain)
    start = assemble(run_ranks(_fp16_steps, 1, replace(serial, steps=1, learning_rate=1e-12)))
    (alone,) = run_ranks(_fp16_steps, 1, serial)
    whole, norms = assemble([alone]), alone["norms"]
    overflows = halves[0]["flags"].index(True)
    assert overflows > 0, "the scale was not too large"
    for rank in halves:
        assert rank["flags"] == halves[0]["flags"] and sum(rank["flags"]) == case.steps
        assert rank["unmoved"] == [not taken for taken in rank["flags"]]
        assert rank["norms"] == pytest.approx(norms, rel=0.01)
    weights = assemble(halves)
    for name, value in whole.items():
        if not (moved := np.abs(value - start[name]).max()):
            continue  # frozen
        assert np.abs(weights[name] - value).max() <= 0.02 * moved, name


def _overflow_on_one_rank(rank: int, case: Case, where: str, culprit: int) -> dict[str, Any]:
    """A good step, and one in which the gradient of `where` overflows on one rank alone."""
    engine = engine_of(case)
    optimizer, (good, bad) = engine.deepspeed.optimizer, global_batches(case)[:2]
    assert engine.train_step(micro_batches_of(engine, case, good), case.learning_rate).taken
    before, scale = [*_weights(engine), *_state(engine)], loss_scaler_state(optimizer)["cur_scale"]
    with planted(engine, case, rank, Plant("gradient", where, culprit, 1)):
        result = engine.train_step(micro_batches_of(engine, case, bad), case.learning_rate)
    return {
        "taken": result.taken,
        "unmoved": all(map(torch.equal, before, [*_weights(engine), *_state(engine)])),
        "scales": (scale, result.readback.numbers.loss_scale, loss_scaler_state(optimizer)["cur_scale"]),
        "steps": optimizer_step_count(engine),
    }


def _state(engine: Engine) -> list[Tensor]:
    moments = moment_names(engine)
    whole = [read_parameter(parameter, moments) for _, parameter in engine.parameters()]
    return [value.clone() for values in whole for value in values.values()]


HEAD_NORM = "model.norm.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "where"),
    [
        (Case(pp=2), HEAD_NORM),
        (Case(pp=2, zero=2), HEAD_NORM),
        (Case(pp=2, zero=3), HEAD_NORM),
        (Case(tp=2), "model.layers.1.mlp.down_proj.weight"),
        (Case(tp=2, sequence_parallel=True, sequence=34), HEAD_NORM),
        (Case(tp=2, model=EXPERTS), "model.layers.1.mlp.experts.down_proj.weight"),
        (Case(dp=2, ep=2, model=EXPERTS), "model.layers.1.mlp.experts.down_proj.weight"),
        (Case(dp=2), HEAD_NORM),
        (Case(dp=2, zero=2), HEAD_NORM),
        (Case(dp=2, zero=3), HEAD_NORM),
        (Case(dp=2, offload={"optimizer": "cpu"}), HEAD_NORM),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_is_seen_by_all(case: Case, where: str) -> None:
    """On one stage, tensor rank, expert or replica: nobody steps, and the scale falls everywhere, once."""
    for rank in run_ranks(_overflow_on_one_rank, 2, replace(case, dtype="fp16", fp16=SMALL), where, 1):
        assert rank == {"taken": False, "unmoved": True, "scales": (2.0**8, 2.0**8, 2.0**7), "steps": 1}


class _Asked:
    """A gate that lets all steps be taken; one that waits has the host decide."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits

    def takes(self, loss: Callable[[], float]) -> bool:
        return True

    def examine(self) -> None:
        pass


def _decided_by(rank: int, case: Case, waits: bool | None) -> tuple[list[bool], list[Tensor], dict[str, float]]:
    engine = engine_of(case)
    gate, flags = None if waits is None else _Asked(waits), []
    for batch in global_batches(case):
        flags.append(engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate, gate).taken)
        engine.decision.allow_updates()
    return flags, [*_weights(engine), *_state(engine)], loss_scaler_state(engine.deepspeed.optimizer)


@pytest.mark.slow
def test_whoever_decides_the_numbers_are_the_same_bits() -> None:
    """The host, which is asked first, or the device, whose answer is read late."""
    case = Case(dp=2, dtype="fp16", fp16=TOO_LARGE, steps=16, clipping=0.5)
    (flags, numbers, scaler), *others = [run_ranks(_decided_by, 2, case, waits)[0] for waits in (True, False, None)]
    assert False in flags and True in flags
    for other in others:
        assert other[0] == flags and other[2] == scaler
        assert all(map(torch.equal, other[1], numbers))


def _held_back(rank: int, case: Case) -> list[dict[str, float]]:
    """Steps behind one that overflowed and that nobody has looked into yet."""
    engine, states = engine_of(case), []
    for batch in global_batches(case):
        engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate, _Asked(False))
        states.append(loss_scaler_state(engine.deepspeed.optimizer))
    return states


@pytest.mark.slow
def test_steps_that_are_held_back_do_not_move_the_scale() -> None:
    for first, *others in run_ranks(_held_back, 2, Case(dp=2, dtype="fp16", fp16=TOO_LARGE)):
        assert first["cur_scale"] == 2.0**25 and all(other == first for other in others)
