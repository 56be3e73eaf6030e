"""The optimizer gets the mean of the gradients that backward computed, to the rounding of an fp32 sum.

Would catch a reduction that is missing, done twice, or done in the format of the weights, where bf16's own error of the
model is as large as what it loses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch.parity.comparison import reduction_bound
from launch.parity.micro_batch_gradients import MicroBatchGradients
from megalite.engine.parameter_state import reading_gradients
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks

TIED = {"tie_word_embeddings": True}
OFFLOADED = {"optimizer": "cpu"}


def _largest_errors(rank: int, case: Case) -> dict[str, float]:
    """The largest error of each parameter's gradient in any of the case's steps."""
    engine = engine_of(case)
    names: dict[Any, str] = {parameter: name for name, parameter in engine.parameters()}
    worst: dict[str, float] = {}
    for batch in global_batches(case):
        backward = MicroBatchGradients(engine)

        def take(parameter: nn.Parameter, gradient: Tensor, backward: MicroBatchGradients = backward) -> None:
            assert gradient.dtype == torch.float32
            error = float(backward.errors(parameter, gradient).max())
            worst[names[parameter]] = max(worst.get(names[parameter], 0.0), error)

        with backward.watching(), reading_gradients(engine, take):
            assert engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate).taken
    return worst


CASES = [
    Case(accumulation=3),
    Case(pp=2, dp=2, accumulation=3, model=TIED),
    Case(tp=2, sequence_parallel=True, sequence=34, accumulation=2),
    Case(dp=2, zero=2, accumulation=2, optimizer="sgd"),
    Case(dp=3, zero=2, accumulation=2),  # halves are exact in every format, thirds are not
    Case(dp=2, zero=3, accumulation=2),
    Case(pp=2, accumulation=2, model=TIED, offload=OFFLOADED),
    Case(dp=2, zero=2, accumulation=3, offload=OFFLOADED),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [replace(case, dtype="bf16") for case in CASES], ids=str)
def test_gradients_are_the_mean_of_what_backward_computed(case: Case) -> None:
    check(case, run_ranks(_largest_errors, case.world_size, case))


@pytest.mark.slow
def test_also_in_fp16_over_stages_that_share_a_weight() -> None:
    case = Case(pp=2, dp=2, accumulation=2, model=TIED, dtype="fp16", micro_batch=1)
    check(case, run_ranks(_largest_errors, case.world_size, case))


def check(case: Case, ranks: list[dict[str, float]]) -> None:
    bound = reduction_bound(case.config().precision, case.dp * case.accumulation)
    assert bound < 2e-6, "fp32 is what is stated"
    for rank, errors in enumerate(ranks):
        assert errors
        for name, error in errors.items():
            assert error <= bound, f"{case}, rank {rank}, {name}: off by {error:.1e}, rounding explains {bound:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(dp=2, accumulation=3), Case(dp=2, zero=2)], ids=str)
def test_a_sum_in_bf16_is_seen(case: Case) -> None:
    """Where it is asked for: the error is that of a rounding or two, and within the bound of that format."""
    case = replace(case, dtype="bf16", reduction="bf16", steps=1)
    fp32 = reduction_bound(replace(case, reduction=None).config().precision, case.dp * case.accumulation)
    stated = reduction_bound(case.config().precision, case.dp * case.accumulation)
    worst = max(max(errors.values()) for errors in run_ranks(_largest_errors, case.world_size, case))
    assert 100 * fp32 < worst <= stated
