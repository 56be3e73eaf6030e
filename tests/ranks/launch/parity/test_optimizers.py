"""Muon and moments in bf16 on layouts, against torch's own optimizers on transformers' parameters on one process.

Buckets are so small that partitions cut matrices, and the clip bites in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launch.parity.layout import ParityLayout
from launch.parity.verify import References, Session
from megalite.engine.optimizers import build as optimizers
from megalite.engine.optimizers import muon
from megalite.engine.optimizers.muon import OwnPartition
from megalite.engine.reduction.partitioned_step import PartitionedStep
from tests.helpers import defects
from tests.helpers.odd_sizes import TIMEOUT_S, explain, problem, references_of

LAYOUTS = [
    ParityLayout(tp=2, dp=2),
    ParityLayout(dp=3),
    ParityLayout(pp=2),
    ParityLayout(dp=2, zero=2, accumulation=2),
    ParityLayout(tp=2, dp=2, zero=2, sequence_parallel=True),
    ParityLayout(tp=4),
]


@cache
def _references(name: str, dtype: Any = "fp32", reference: str = "transformers", **options: Any) -> References:
    asked = problem(
        LAYOUTS,
        model={"num_hidden_layers": 2},
        sequence=36,
        optimizer={"name": name, **options},
        training={"gradient_clipping": 0.05},
        parallel={"gradient_bucket_size": 3000},
        precision={"dtype": dtype},
    )
    return references_of(asked, dtype, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=[pytest.mark.exhaustive] if i > 2 else []) for i, one in enumerate(LAYOUTS)],
    ids=str,
)
def test_muon_is_torchs_on_any_layout(layout: ParityLayout) -> None:
    session = Session(_references("muon", adjust_lr="original"), TIMEOUT_S)
    verdict = session.run(layout)
    assert verdict.passed, explain(verdict)
    kinds = {deviation.quantity.kind for deviation in verdict.deviations if deviation.quantity.training == "muon"}
    assert {"weight", "momentum_buffer", "exp_avg"} <= kinds


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [ParityLayout(tp=2), ParityLayout(dp=2, zero=2)], ids=str)
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_moments_in_bf16(name: str, layout: ParityLayout, dtype: str) -> None:
    verdict = Session(_references(name, dtype, moments_dtype="bf16"), TIMEOUT_S).run(layout)
    assert verdict.passed, explain(verdict)


def each_rank_orthogonalizes_its_slice() -> None:
    """Of a matrix that is cut over tensor-parallel ranks the own slice, in place of the whole."""
    matrices = OwnPartition.matrices

    def of_a_slice(self: OwnPartition, updates: Tensor) -> dict[str, Tensor]:
        others = [rank for rank in range(len(updates)) if rank != dist.get_rank() % len(updates)]
        updates[others] = 0.0
        return matrices(self, updates)

    OwnPartition.matrices = of_a_slice  # type: ignore[method-assign]


def sections_are_one_matrix() -> None:
    """The fused gate|up of our parameters is taken for one matrix."""
    orthogonalized = muon.orthogonalized

    def joined(stacks: dict[str, Tensor]) -> dict[str, Tensor]:
        names = [name for name in stacks if name.endswith(("gate_proj.weight", "up_proj.weight"))]
        if len(names) < 2:
            return orthogonalized(stacks)
        both = orthogonalized({"both": torch.cat([stacks[name] for name in names[:2]])})["both"]
        found = orthogonalized(stacks)
        found |= dict(zip(names[:2], both.split([len(stacks[name]) for name in names[:2]]), strict=True))
        return found

    muon.orthogonalized = joined


def clip_is_ignored() -> None:
    initialize = PartitionedStep.__init__

    def without(self: Any, *arguments: Any) -> None:
        initialize(self, *arguments)
        self._clipping = 0.0

    PartitionedStep.__init__ = without  # type: ignore[method-assign]


def nothing_is_orthogonalized() -> None:
    """All matrices are stepped on by AdamW."""
    optimizers.is_orthogonalized = lambda shard: False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "layout"),
    [
        (each_rank_orthogonalizes_its_slice, ParityLayout(tp=2)),
        (sections_are_one_matrix, ParityLayout()),
        (clip_is_ignored, ParityLayout()),
        pytest.param(nothing_is_orthogonalized, ParityLayout(), marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_planted_defect_of_muon_is_caught(defect: Callable[[], None], layout: ParityLayout) -> None:
    """In the training with Muon, that is: the one with SGD would catch the clip alone."""
    session = Session(_references("muon", adjust_lr="original"), TIMEOUT_S, solve=partial(defects.planted, defect))
    verdict = session.run(layout)
    assert verdict.crash is None, explain(verdict)
    wrong = {failure.quantity.kind for failure in verdict.failures if failure.quantity.training == "muon"}
    assert wrong & {"weight", "momentum_buffer"}, explain(verdict)
