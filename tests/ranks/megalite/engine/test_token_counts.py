"""The loss is the same to the bit whether replicas add their valid targets up or know those of the global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from launch.parity.problem import Batch
from megalite.engine.engine import Engine
from megalite.parallel.loss import IGNORED
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks

CASES = [Case(dp=2, accumulation=2, document_mask=True), Case(dp=2, zero=2, accumulation=2), Case(pp=2, accumulation=2)]


def _batches(case: Case) -> list[Batch]:
    """As they come, without a valid target on the last replica or stage's micro-batch, and without any."""
    first, second, third = global_batches(case)
    half, none = second.targets.copy(), np.full_like(third.targets, IGNORED)
    half[len(half) // 2 :] = IGNORED
    return [first, replace(second, targets=half), replace(third, targets=none)]


def _losses(engine: Engine, case: Case, *, is_known: bool) -> list[float]:
    found = []
    for batch in _batches(case):
        valid: Any = int((batch.targets != IGNORED).sum()) if is_known else None
        mine = [replace(each, global_valid_targets=valid) for each in micro_batches_of(engine, case, batch)]
        found.append(float(engine.evaluate(mine, case.accumulation)))
        result = engine.train_step(mine, case.learning_rate)
        found += [result.loss, result.grad_norm]
    return found


def _both(rank: int, cases: list[Case]) -> list[list[list[float]]]:
    found = []
    for case in cases:
        engines = [engine_of(case), engine_of(case)]
        found.append(
            [_losses(engine, case, is_known=is_known) for engine, is_known in zip(engines, (True, False), strict=True)]
        )
        for engine in engines:
            engine.deepspeed.destroy()
    return found


def test_a_known_count_gives_the_loss_of_a_counted_one() -> None:
    for ranks in run_ranks(_both, 2, CASES):
        for case, (known, counted) in zip(CASES, ranks, strict=True):
            assert known == counted, case
            assert known[-3:-1] == [0.0, 0.0], f"{case}: no token has a target"
