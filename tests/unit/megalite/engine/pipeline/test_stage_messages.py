"""A message of a pipeline carries a block's input whole, in as many bytes as it says.

That masks of dropout are the same on every layout: tests/ranks/launch/parity/test_special_models.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.engine.pipeline.stage_messages import MessageLayout
from megalite.parallel.layers import BlockInput
from megalite.schedules.program import MessageKind

CPU = torch.device("cpu")


def _layout(
    batch: int, sequence: int, cut: int, hidden: int, dtype: torch.dtype, *, is_packed: bool, has_dropout: bool
) -> MessageLayout:
    """One whose hidden states are cut along the sequence, and positions are not."""
    positions, samples = (batch, sequence * cut) if is_packed else None, (batch,) if has_dropout else None
    return MessageLayout((batch, sequence, hidden), dtype, CPU, positions, samples)


layouts = st.builds(
    _layout,
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    is_packed=st.booleans(),
    has_dropout=st.booleans(),
)


def _input(layout: MessageLayout, seed: int) -> BlockInput:
    draw = torch.Generator().manual_seed(seed)

    def numbers(shape: tuple[int, ...] | None) -> Tensor | None:
        return None if shape is None else torch.randint(-(2**62), 2**62, shape, generator=draw)

    hidden = torch.randn(layout.hidden, generator=draw).to(layout.dtype).requires_grad_()
    return BlockInput(hidden, numbers(layout.positions), numbers(layout.sample_ids))


@given(layouts, st.integers(0, 2**31))
def test_a_stage_finds_again_what_was_sent(layout: MessageLayout, seed: int) -> None:
    """The receiver has nothing but the bytes of a buffer of its own."""
    sent = _input(layout, seed)
    message, buffer = layout.pack(sent), layout.new_buffer(MessageKind.ACTIVATION)
    assert (message.shape, message.dtype) == (buffer.shape, buffer.dtype)
    assert message.is_contiguous() and not message.requires_grad
    numbers = sum(math.prod(shape) for shape in (layout.positions, layout.sample_ids) if shape is not None)
    hidden = layout.unpack(message).hidden
    assert message.nbytes == hidden.nbytes + 8 * (numbers + numbers % 2), "hidden states begin at 16 bytes, for GEMMs"
    assert hidden.data_ptr() + hidden.nbytes == message.data_ptr() + message.nbytes
    buffer.copy_(message)
    for mine, theirs in zip(layout.unpack(buffer), sent, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@given(layouts, st.integers(0, 2**31))
def test_what_was_found_takes_part_in_backward(layout: MessageLayout, seed: int) -> None:
    """The gradient of received hidden states is a message of its own, without positions and sample ids."""
    hidden = layout.unpack(layout.pack(_input(layout, seed))).hidden
    hidden.requires_grad_()
    (2.0 * hidden).sum().backward()
    expected = layout.new_buffer(MessageKind.GRADIENT)
    assert hidden.grad is not None and hidden.grad.is_contiguous()
    assert (hidden.grad.shape, hidden.grad.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(hidden.grad, torch.full_like(expected, 2.0))


@pytest.mark.parametrize("missing", ["positions", "sample_ids"])
def test_an_input_that_config_does_not_know_is_refused(missing: str) -> None:
    layout = _layout(2, 3, 1, 4, torch.float32, is_packed=True, has_dropout=True)
    with pytest.raises(AssertionError, match="differ from what config says"):
        layout.pack(_input(layout, 0)._replace(**{missing: None}))
