"""What an engine step costs a rank: waits for the device and collectives, against budgets.py.

Would catch: a number read on the host in the middle of a step, a collective more per step or micro-batch, gradients
that replicas all-reduce or reduce only when backward is over.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest

from megalite.config.sections import GuardsConfig
from megalite.parallel.linear import LinearLayer
from megalite.parallel.loss import IGNORED
from megalite.resilience.guards import Guard
from tests.helpers.counting import Call, calls_of, collectives_of, syncs_of
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks
from tests.performance.budgets import KERNELS_OF_SOURCE_LOSSES, STEPS

PADDING = 100  # bytes to which ZeRO fills up its partitions


def _second_step(rank: int, case: Case, guards: dict[str, str]) -> tuple[list[Call], int]:
    """The calls of this rank, and the numbers in its parameters. Targets are counted beforehand, as the loader does."""
    engine, calls = engine_of(case), []
    guard = Guard(engine, GuardsConfig.model_validate(guards))
    for batch in global_batches(case)[:2]:
        valid = int((batch.targets != IGNORED).sum())
        mine = [
            replace(each, global_valid_targets=valid, sources=each.samples % case.sources if case.sources else None)
            for each in micro_batches_of(engine, case, batch)
        ]
        calls = calls_of(lambda mine=mine: engine.train_step(mine, 1e-3, guard))
    return calls, sum(parameter.numel() for _, parameter in engine.parameters())


@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_to_its_budget(name: str) -> None:
    budget = STEPS[name]
    for calls, _ in run_ranks(_second_step, budget.case.world_size, budget.case, budget.guards):
        assert Counter(call.name for call in collectives_of(calls)) == budget.collectives
        assert len(syncs_of(calls)) == budget.syncs, syncs_of(calls)


def test_replicas_reduce_each_gradient_once_and_beside_backward() -> None:
    """In fp32, whatever the number of micro-batches; updated weights come back in bf16."""
    case = STEPS["dp 2"].case
    for calls, parameters in run_ranks(_second_step, 2, case, {}):
        moved: Counter[str] = Counter()
        for call in collectives_of(calls):
            moved[call.name] += call.size
        assert 0 <= moved["reduce_scatter"] - 4 * parameters < PADDING * STEPS["dp 2"].collectives["reduce_scatter"]
        assert 0 <= moved["all_gather"] - 2 * parameters < PADDING * STEPS["dp 2"].collectives["all_gather"]
        reductions = [place for place, call in enumerate(calls) if call.name == "reduce_scatter"]
        last_gemm = max(place for place, call in enumerate(calls) if call.is_gemm)
        order = [name for name, _ in groupby(call.name for call in collectives_of(calls))]
        assert order == ["reduce_scatter", "all_reduce", "all_gather"], "gradients, norm and loss, weights"
        assert sum(place < last_gemm for place in reductions) >= len(reductions) - 2, "reduced behind backward"


def test_losses_by_source_take_a_few_kernels() -> None:
    """Two of each micro-batch, of which neither reads more than its tokens' losses."""
    counts = {}
    for accumulation, sources in itertools.product((1, 3), (0, 5)):
        ((calls, _),) = run_ranks(_second_step, 1, Case(accumulation=accumulation, sources=sources), {})
        counts[accumulation, sources] = len(calls)
    of_step = counts[1, 5] - counts[1, 0]
    of_micro_batch = (counts[3, 5] - counts[3, 0] - of_step) / 2
    assert (of_micro_batch, of_step - of_micro_batch) == KERNELS_OF_SOURCE_LOSSES


def _passes_over_weight_gradients(rank: int, case: Case) -> tuple[int, int]:
    """The additions and copies of matrices as large as a linear layer's weight in a step, and the products.

    Layers hand their products to the reducer, as on a GPU.
    """
    engine = engine_of(case)
    engine.reducer.takes_products = True
    shapes = {each.weight.shape for each in engine.deepspeed.module.modules() if isinstance(each, LinearLayer)}
    (batch, *_) = global_batches(case)
    mine = micro_batches_of(engine, case, batch)
    calls = calls_of(lambda: engine.train_step(mine, 1e-3))
    sized = [call for call in calls if call.shapes and call.shapes[-1] in shapes]
    return sum(call.name in ("add", "add_", "copy_", "clone") for call in sized), sum(call.is_gemm for call in sized)


def test_products_add_weight_gradients_to_their_sum() -> None:
    case = Case(optimizer="sgd", accumulation=3, learning_rate=0.1)
    ((passes, products),) = run_ranks(_passes_over_weight_gradients, 1, case)
    assert passes == 0 and products >= 3 * 4, (passes, products)
