"""Dropout needs the numbers of the samples on every stage; nothing else does.

That masks are the same on every layout: tests/ranks/launch/parity/test_special_models.py. What they do:
tests/unit/models/test_dropout.py.
"""

from __future__ import annotations

import pytest
import torch

from launch.parity.problem import Batch
from megalite.engine.engine import first_payload
from megalite.parallel.layers import BlockInput
from tests.helpers.engine_cases import Case, global_batches


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


@pytest.mark.parametrize("has_dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("document_mask", [False, True], ids=["plain", "packed"])
def test_a_stage_finds_again_what_was_sent(document_mask: bool, has_dropout: bool) -> None:
    """Positions and sample ids are told apart by what the model has, whatever their shapes are."""
    (batch,) = global_batches(Case(document_mask=document_mask, steps=1))
    payload = first_payload(batch, torch.device("cpu"), has_dropout=has_dropout)
    found = BlockInput.from_payload(payload, has_dropout)
    assert torch.equal(found.hidden, torch.from_numpy(batch.tokens))
    assert (found.positions is not None) == document_mask and (found.sample_ids is not None) == has_dropout
    if found.positions is not None:
        assert batch.positions is not None and torch.equal(found.positions, torch.from_numpy(batch.positions))
    if found.sample_ids is not None:
        assert torch.equal(found.sample_ids, torch.from_numpy(batch.samples))


def _parts(batch: Batch, *, has_dropout: bool, device: torch.device) -> tuple[torch.Tensor, ...]:
    payload = first_payload(batch, device, has_dropout=has_dropout)
    return (payload,) if isinstance(payload, torch.Tensor) else payload
