"""The loss of every sample, as a source of its own, against transformers in float64 on every kind of layout.

Would catch rows or micro-batches that change places with others, are counted twice or not at all, a replica or stage
that is missing from the sum, tokens of a chunk or of another vocabulary part, a loss of routers, and targets that carry
no loss. Float32 sums in another order are off by 1e-6 of a sample's loss; a token more or less is 1e-3 of it at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from launch.parity.problem import Batch, ParityProblem
from launch.reference.models import HEAD, Rows, TransformersModel
from megalite.engine.engine import Engine
from megalite.engine.statistics.source_losses import SourceLosses
from megalite.parallel import loss as loss_module
from megalite.parallel.loss import IGNORED
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks

RELATIVE = 2e-5  # of a sample's loss
TIED = {"tie_word_embeddings": True}
EXPERTS = {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 101}
SERIAL = Case(accumulation=4, micro_batch=5, document_mask=True, steps=2, sources=20)  # chunks end inside of rows
TWO = replace(SERIAL, micro_batch=2, sources=8)
CASES = [
    SERIAL,
    replace(SERIAL, model=EXPERTS, router={"sequence_loss": 0.5, "z_loss": 0.5}),
    replace(TWO, dp=2, accumulation=2),
    replace(TWO, dp=2, accumulation=2, zero=3, document_mask=False),
    replace(SERIAL, tp=2, sequence=34, sequence_parallel=True),
    replace(TWO, pp=2, model=TIED),
    replace(TWO, pp=2, schedule="interleaved"),
    replace(TWO, pp=2, schedule="zero-bubble"),
    replace(TWO, pp=2, schedule="zb-v", zero=2),
    replace(TWO, pp=2, schedule="dualpipev"),
]
MORE_CASES = [
    replace(SERIAL, compile="blocks"),
    replace(TWO, dp=2, accumulation=2, zero=2),
    replace(TWO, pp=2, dp=2, accumulation=2, zero=3),
    replace(TWO, tp=2, pp=2, dp=2, accumulation=2),
]
PLANTS = ("rows shifted by one", "sources of another replica", "a micro-batch forgotten")


def batches_of(case: Case) -> list[Batch]:
    """Batches with targets left out in the middle of documents, as in conversations, and one row without any."""
    batches, draw = [], np.random.default_rng(3)
    for batch in global_batches(case):
        targets = np.where(draw.random(batch.targets.shape) < 0.3, IGNORED, batch.targets)
        targets[2] = IGNORED
        batches.append(replace(batch, targets=targets))
    return batches


def sources_of(samples: np.ndarray, case: Case) -> np.ndarray:
    """A source of its own for each sample of a step, in another order than the rows'."""
    return (3 * samples + 1) % case.sources


@contextmanager
def planted(plant: str, engine: Engine) -> Iterator[None]:
    """Lets this rank make a mistake."""
    add, calls = SourceLosses.add, iter(range(1000))

    def shifted(self: SourceLosses, sources: torch.Tensor, token_losses: torch.Tensor) -> None:
        add(self, sources.roll(1), token_losses)

    def forgetful(self: SourceLosses, sources: torch.Tensor, token_losses: torch.Tensor) -> None:
        if next(calls) != 1:
            add(self, sources, token_losses)

    with ExitStack() as undo:
        if plant == "rows shifted by one":
            undo.enter_context(patch.object(SourceLosses, "add", shifted))
        elif plant == "a micro-batch forgotten" and engine.coordinate.data_rank == 1:
            undo.enter_context(patch.object(SourceLosses, "add", forgetful))
        yield


def steps_of(rank: int, case: Case, plant: str = "") -> list[tuple[float, np.ndarray]]:
    """The loss and the sums by source of each step, at a learning rate of 0."""
    with patch.object(loss_module, "CHUNK_BYTES", {"cpu": 0}):
        engine, found = engine_of(case), []
        with planted(plant, engine):
            for batch in batches_of(case):
                away = case.batch // case.dp if plant == "sources of another replica" else 0
                mine = [
                    replace(each, sources=sources_of(each.samples + away, case))
                    for each in micro_batches_of(engine, case, batch)
                ]
                result = engine.train_step(mine, 0.0)
                sums = result.readback.source_losses
                assert sums is not None
                found.append((result.loss, sums.numpy().copy()))
        engine.deepspeed.destroy()
    return found


class _AsItStarts(ParityProblem):
    """The model of a run, as it is initialized."""

    def initial_value(self, name: str, value: np.ndarray, where: tuple[slice, ...], shape: tuple[int, ...]) -> Any:
        return value


def expected(case: Case) -> list[np.ndarray]:
    """The sums by source of each step, from the logits of transformers."""
    model, steps = TransformersModel.of(_AsItStarts(case.config(), case.seed, 1), torch.float64, "cpu"), []
    for batch in batches_of(case):
        positions = None if batch.positions is None else torch.from_numpy(batch.positions)
        with torch.no_grad():
            logits = model.outputs(Rows(torch.from_numpy(batch.tokens), positions))[HEAD]
        targets = torch.from_numpy(batch.targets)
        losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(dim=1).numpy()
        sums = np.zeros((2, case.sources))
        sums[0, sources_of(batch.samples, case)] = losses
        sums[1, sources_of(batch.samples, case)] = (batch.targets != IGNORED).sum(axis=1)
        steps.append(sums)
    return steps


def difference(found: list[tuple[float, np.ndarray]], wanted: list[np.ndarray]) -> str:
    """What differs, empty if nothing does."""
    for step, ((loss, sums), truth) in enumerate(zip(found, wanted, strict=True), start=1):
        if not np.array_equal(sums[1], truth[1]):
            return f"step {step}: {sums[1]} valid targets instead of {truth[1]}"
        if not np.allclose(sums[0], truth[0], rtol=RELATIVE, atol=0):
            return f"step {step}: losses {sums[0]} instead of {truth[0]}"
        if sums[0].sum() / sums[1].sum() != pytest.approx(loss, rel=1e-6):
            return f"step {step}: the mean over all sources is not the loss of the step"
    return ""


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in MORE_CASES)], ids=str
)
def test_the_loss_of_each_sample_is_that_of_transformers(case: Case, one_thread: None) -> None:
    wanted = expected(case)
    for rank, found in enumerate(run_ranks(steps_of, case.world_size, case)):
        assert not (what := difference(found, wanted)), f"{case}, rank {rank}: {what}"


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_seen(plant: str, one_thread: None) -> None:
    case = replace(TWO, dp=2, accumulation=2)
    wanted = expected(case)
    assert all(difference(found, wanted) for found in run_ranks(steps_of, 2, case, plant))
