"""Dropout on any layout is dropout on one process: every case trains as the serial run of the same global batches.

transformers draws other masks, so the serial run is our own; tests/models/test_dropout.py holds that against it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.engine.engine import first_payload
from tests.engine.parity import (
    Batch,
    Case,
    Reference,
    assemble,
    engine_of,
    global_batches,
    initial_weights,
    micro_batches_of,
    reference,
    train_all,
)
from tests.engine.test_parity import RELATIVE, Trained, assert_losses_and_norms_equal, assert_updates_equal
from tests.ranks import run_ranks

DROPOUT = {"attention_dropout": 0.2, "residual_dropout": 0.1, "embedding_dropout": 0.15}
DROPS = Case(model=DROPOUT, sequence=34, global_batch=12, micro_batch=12).with_optimizer("sgd")
LAYOUTS = [
    replace(DROPS, micro_batch=3),
    replace(DROPS, tp=2),
    replace(DROPS, tp=2, micro_batch=4, sequence_parallel=True),
    replace(DROPS, pp=2, micro_batch=3),
    replace(DROPS, dp=2, micro_batch=3, zero=2),
    replace(DROPS, dp=2, micro_batch=3, zero=3),
    replace(DROPS, tp=2, pp=2, micro_batch=6, recompute="selective"),
    replace(DROPS, tp=2, pp=2, dp=2, micro_batch=3),
    replace(DROPS, tp=2, pp=2, dp=2, micro_batch=2, sequence_parallel=True, recompute="full", document_mask=True),
]

_serial: dict[str, Reference] = {}


def serial(case: Case) -> Reference:
    """The same batches on one rank in one micro-batch; computed once for all layouts."""
    alone = replace(DROPS, document_mask=case.document_mask)
    key = repr(alone)
    if key not in _serial:
        ((ran,),) = run_ranks(train_all, 1, [alone])
        initial = {name: weight.numpy() for name, weight in initial_weights(alone).items()}
        _serial[key] = Reference(ran["losses"], ran["norms"], initial, assemble([ran]))
    return _serial[key]


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_drops_the_same_numbers(case: Case) -> None:
    """Losses, norms and SGD's updates within test_parity's tolerances, which are those of sums in another order.

    One mask that differs, on one rank, at one step or in a recomputation, is an error a thousand times larger.
    """
    expected = serial(case)
    assert min(expected.norms) > case.clip, "the clip must bite at every step"
    without = reference(replace(case, model={})).losses
    assert max(abs(a / b - 1) for a, b in zip(expected.losses, without, strict=True)) > 100 * RELATIVE
    ranks = [ran for (ran,) in run_ranks(train_all, case.world_size, [case])]
    run = Trained(case, ranks, assemble(ranks), expected)
    assert_losses_and_norms_equal(run)
    assert_updates_equal(run)


def _evaluate_around_a_step(rank: int, case: Case) -> dict[str, Any]:
    engine = engine_of(case)
    first, second = (micro_batches_of(engine, case, batch) for batch in global_batches(case))
    count = case.batch // (case.micro_batch * case.dp)
    evaluated = float(engine.evaluate(first, count))
    trained = [float(engine.train_step(first, case.learning_rate).loss)]
    engine.evaluate(first, count)
    trained.append(float(engine.train_step(second, case.learning_rate).loss))
    return {"evaluated": evaluated, "trained": trained}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "zero": 3, "micro_batch": 3}, {"tp": 2, "pp": 2, "dp": 2, "micro_batch": 3}], ids=str
)
def test_evaluation_drops_nothing_and_shifts_no_mask(layout: dict[str, int]) -> None:
    """Evaluation is transformers' loss without dropout, and the steps around it are those of a run without it."""
    case = replace(DROPS, steps=2, **layout)
    expected = serial(case).losses[:2]  # batches are drawn one after another, so the first two are the same
    without = reference(replace(case, model={})).losses[0]
    for rank, seen in enumerate(run_ranks(_evaluate_around_a_step, case.world_size, case)):
        np.testing.assert_allclose(seen["evaluated"], without, RELATIVE, err_msg=f"{case} rank {rank}")
        np.testing.assert_allclose(seen["trained"], expected, RELATIVE, err_msg=f"{case} rank {rank}")


@pytest.mark.parametrize("document_mask", [False, True], ids=["plain", "packed"])
def test_sample_numbers_travel_only_with_dropout(document_mask: bool) -> None:
    """A pipeline sends the payload to every stage, so what nobody reads must not be in it."""
    (batch,) = global_batches(Case(document_mask=document_mask, steps=1))
    device = torch.device("cpu")
    shapes = [tuple(part.shape) for part in _parts(batch, has_dropout=False, device=device)]
    assert shapes == [(3, 33), (3, 33)] if document_mask else shapes == [(3, 33)]
    *same, samples = _parts(batch, has_dropout=True, device=device)
    assert [tuple(part.shape) for part in same] == shapes
    assert samples.tolist() == batch.samples.tolist() == [0, 1, 2] and samples.dtype == torch.int64


def _parts(batch: Batch, *, has_dropout: bool, device: torch.device) -> tuple[torch.Tensor, ...]:
    payload = first_payload(batch, device, has_dropout=has_dropout)
    return (payload,) if isinstance(payload, torch.Tensor) else payload
