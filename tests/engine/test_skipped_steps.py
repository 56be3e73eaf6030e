"""A step with gradients that are not finite is skipped on every rank, said so, and leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megalite.engine.engine import Engine
from tests.engine.cases import Case, engine_of, global_batches, local_weights, micro_batches_of
from tests.ranks import run_ranks


def _step(engine: Engine, case: Case, index: int) -> dict[str, Any]:
    batch = global_batches(case)[index]
    result = engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
    return {
        "skipped": result.skipped,
        "loss": float(result.loss),
        "norm": float(result.grad_norm),
        "weights": local_weights(engine),
    }


def _train_with_a_bad_step(rank: int, case: Case) -> dict[str, Any]:
    """One good step, one where a single gradient of the last rank is not finite, one good step."""
    engine = engine_of(case)
    steps = [_step(engine, case, 0)]
    if rank == case.world_size - 1:
        *_, (_, parameter) = engine.parameters()
        poison = parameter.register_hook(lambda grad: torch.full_like(grad, float("nan")))
    steps.append(_step(engine, case, 1))
    if rank == case.world_size - 1:
        poison.remove()
    steps.append(_step(engine, case, 2))
    undisturbed = engine_of(case)
    return {
        "steps": steps,
        "skips": engine.deepspeed.skipped_steps,
        "undisturbed": [_step(undisturbed, case, index) for index in (0, 2)],
    }


def _equal(a: list[Any], b: list[Any]) -> bool:
    return all(np.array_equal(mine.value, theirs.value) for mine, theirs in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, dp=2, zero=1),
        Case(dp=2, zero=2, accumulation=2),
        Case(dp=2, zero=3),
        Case(tp=2, pp=2, accumulation=2),
        Case(dp=2, zero=1, dtype="bf16"),
        Case(dp=2, zero=2, dtype="bf16", accumulation=2),
        Case(dp=2, zero=3, dtype="bf16"),
        Case(pp=2, dp=2, accumulation=2, dtype="bf16"),
    ],
    ids=str,
)
def test_nan_on_one_rank_skips_the_step_everywhere(case: Case) -> None:
    for rank, seen in enumerate(run_ranks(_train_with_a_bad_step, case.world_size, case)):
        before, bad, after = seen["steps"]
        where = f"{case} rank {rank}"
        assert (before["skipped"], bad["skipped"], after["skipped"]) == (False, True, False), where
        assert seen["skips"] == 1, where
        assert bad["norm"] == float("inf"), where
        assert np.isfinite([bad["loss"], after["loss"], after["norm"]]).all(), where
        assert _equal(bad["weights"], before["weights"]), f"{where}: the skipped step changed weights"
        assert not _equal(after["weights"], before["weights"]), f"{where}: the next step trained nothing"
        # moments, step counter and gradient buffers too: as if the bad batch had never come, to the bit
        expected = seen["undisturbed"][1]
        assert (after["loss"], after["norm"]) == (expected["loss"], expected["norm"]), where
        assert _equal(after["weights"], expected["weights"]), f"{where}: the skipped step left a trace"
