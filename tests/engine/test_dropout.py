"""Dropout needs the numbers of the samples on every stage; nothing else does.

That masks are the same on every layout: tests/verify/test_special_models.py. What they do:
tests/models/test_dropout.py.
"""

from __future__ import annotations

import pytest
import torch

from launch.verify.problem import Batch
from megalite.engine.engine import first_payload
from tests.engine.cases import Case, global_batches


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
