"""A start never holds the model in fp32 beside what it trains, nor under ZeRO-3 more than one layer of it whole."""

from __future__ import annotations

from math import prod

import pytest
from torch import nn

from megalite.engine.deepspeed.internals import is_partitioned
from megalite.parallel import layers
from tests.helpers.engine_cases import Case, engine_of
from tests.helpers.rank_pool import run_fresh_ranks


def _held_by_layer(rank: int, case: Case) -> tuple[list[int], list[int]]:
    """The bytes of parameters that this rank holds as each of its layers is begun, and the numbers of those before."""
    made, held, numbers, name_layer = list[nn.Parameter](), list[int](), list[int](), layers.named_layer

    def watched(*arguments: object) -> nn.Module:
        own = [part for one in made for part in ((one, one.ds_tensor) if is_partitioned(one) else (one,))]
        held.append(sum(each.numel() * each.element_size() for each in own))
        numbers.append(sum(prod(each.shard.local_shape) for each in made))  # type: ignore[attr-defined]
        made.extend((layer := name_layer(*arguments)).parameters())  # type: ignore[arg-type]
        return layer

    layers.named_layer = watched  # type: ignore[assignment]
    engine_of(case)
    return held, numbers


CASES = [(Case(dp=2, zero=3), 4 / 2), (Case(tp=2, dp=2, zero=3, dtype="bf16"), 2 / 2), (Case(pp=2, dtype="bf16"), 2)]


@pytest.mark.parametrize(("case", "bytes_of_a_number"), CASES, ids=str)
def test_a_layer_is_put_where_it_trains_before_the_next_is_made(case: Case, bytes_of_a_number: float) -> None:
    for held, numbers in run_fresh_ranks(_held_by_layer, case.world_size, case):
        assert max(held) > 10_000  # a partition of an odd number is padded
        assert held == pytest.approx([bytes_of_a_number * each for each in numbers], abs=200)
