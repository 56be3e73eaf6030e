"""fp16's loss scale is once in the gradients that stages of a pipeline hand over, also in those of a tied head, and in
those that replicas sum; norm and update are without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config import Config, resolve_layout
from megalite.engine.build import build_engine
from megalite.engine.engine import Engine
from models.decoder import decoder_layers
from tests.helpers.engine_cases import Case, assemble, engine_of, global_batches, local_weights, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks, run_ranks

TIED = {"tie_word_embeddings": True}


def _fp16_engine(case: Case) -> Engine:
    values = case.config().model_dump(mode="json")
    values["deepspeed"] = {"fp16": {"initial_scale_power": 26, "hysteresis": 1}}
    config = Config.model_validate(values)
    layout = resolve_layout(config, case.world_size, "cpu")
    return build_engine(decoder_layers(config.model, config.recompute.mode), config, layout)


def _fp16_steps(rank: int, case: Case) -> dict[str, Any]:
    engine = _fp16_engine(case) if case.dtype == "fp16" else engine_of(case)
    flags, unmoved, norms, taken = [], [], [], 0
    batches = global_batches(case)
    while taken < case.steps:
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
    return [tensor.detach().clone() for tensor in [*(p for _, p in engine.parameters()), *tied]]


FP16: dict[str, Any] = {
    "dtype": "fp16",
    "accumulation": 2,
    "model": TIED,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "steps": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(pp=2, schedule="zero-bubble", **FP16), Case(dp=2, bucket=3000, reduction="fp16", clipping=0.5, **FP16)],
    ids=["pipeline", "replicas"],
)
def test_fp16_with_a_scale_that_is_too_large_at_first(case: Case) -> None:
    """The steps that overflow change nothing, and what follows is training in fp32 but for fp16's rounding.

    SGD, so that a gradient's scale shows: weights move by 1e-2, and 2% of the largest change is what fp16 may lose.
    """
    halves = run_fresh_ranks(_fp16_steps, 2, case)
    serial = replace(case, pp=1, dp=1, schedule="1f1b", dtype="fp32", reduction=None, global_batch=case.batch)
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
        moved = np.abs(value - start[name]).max()
        assert np.abs(weights[name] - value).max() <= 0.02 * moved, name
