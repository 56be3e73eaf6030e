"""Micro-batches on their way to a device.

A CPU has no streams: a list of what was asked of them plays their part, so what CUDA makes of it is not tested here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launch.parity.problem import Batch
from megalite.engine.batch_transfer import BatchTransfer

CPU = torch.device("cpu")


def _batch(has_positions: bool) -> Batch:
    draw = np.random.default_rng()
    tokens, targets = draw.integers(0, 99, (2, 3, 7))
    positions = draw.integers(0, 7, (3, 7)) if has_positions else None
    return Batch(tokens, targets, positions, np.arange(3))


@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize("has_positions", [False, True])
def test_a_device_gets_what_the_model_reads(has_positions: bool, has_dropout: bool) -> None:
    """Every stage gets what is in the first input, so sample ids without dropout would be sent for nobody."""
    batches = [_batch(has_positions) for _ in range(2)]
    for batch, found in zip(batches, BatchTransfer(CPU, has_dropout=has_dropout)(batches), strict=True):
        assert np.array_equal(found.inputs.hidden, batch.tokens) and np.array_equal(found.targets, batch.targets)
        inputs = found.inputs
        assert (inputs.positions is not None) == has_positions and (inputs.sample_ids is not None) == has_dropout
        if inputs.positions is not None and batch.positions is not None:
            assert np.array_equal(inputs.positions, batch.positions)
            assert inputs.documents == 3 + np.count_nonzero(batch.positions[:, 1:] == 0)
        assert inputs.sample_ids is None or inputs.sample_ids.tolist() == [0, 1, 2]


def test_copies_leave_pinned_memory_on_their_own_stream_before_the_step_s_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy on the stream of the step would wait for the step before; memory given back while that stream still reads
    it would be written over."""
    asked: list[str] = []
    user = SimpleNamespace(wait_stream=lambda stream: asked.append(f"the step waits for {stream}"))

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        asked.append(f"on {stream}")
        yield
        asked.append(f"off {stream}")

    transfer = BatchTransfer(CPU, has_dropout=False)
    transfer._stream = "copies"  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: user)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (asked.append("pinned"), self)[1])
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: asked.append(f"kept: {stream is user}"))
    transfer([_batch(False), _batch(False)])
    assert asked == ["on copies", *["pinned"] * 4, "off copies", "the step waits for copies", *["kept: True"] * 4]
