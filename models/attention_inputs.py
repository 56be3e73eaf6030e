"""Inputs of attention beside hidden states: angles, masks and boundaries of documents.

In: the positions of a micro-batch, `[batch, seq]`, 0 where a document starts, or None if each row is one document. Out:
`AttentionInputs`, made once per micro-batch for all layers of one kind, so that no layer builds a mask of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from models.attention_masks import (
    added_to_scores,
    causal_mask,
    document_boundaries,
    document_mask,
    made_block_mask,
    numbers_of,
    row_boundaries,
)
from models.rope import Rope, fixed_rotation, rotation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Kernel = Literal["fused", "varlen", "flex", "explicit"]
"""Computation of attention: torch's fused one with or without a mask, flash attention over documents of any length,
FlexAttention, or products of ours that hold all scores."""

AttentionChoice = Literal["auto", "sdpa"]


class AttentionKind(NamedTuple):
    """Properties by which layers need different `AttentionInputs` in one micro-batch."""

    kernel: Kernel
    rope: Rope | None
    window: int | None  # None also where no token is outside of it
    dtype: torch.dtype  # of queries and keys
    cached: int = 0  # tokens before the first one


class AttentionInputs(NamedTuple):
    """Tensors that the attention of all layers of a kind shares in a micro-batch."""

    kernel: Kernel
    cos: Tensor | None = None  # [batch|1, seq, 1, pairs]; None: nothing is rotated
    sin: Tensor | None = None
    # [(batch, 1,) queries, keys]: True where a token is seen for `explicit`, 0 or -inf for `fused`; None: causal
    mask: Tensor | None = None
    boundaries: Tensor | None = None  # [documents or more + 1] int32, of the tokens of all rows, for `varlen`
    block_mask: BlockMask | None = None  # for `flex`


def attention_inputs(
    kind: AttentionKind, shape: tuple[int, int], device: torch.device, positions: Tensor | None, documents: int | None
) -> AttentionInputs:
    """Makes the inputs of layers of `kind` for a micro-batch of `shape` [batch, seq].

    documents: their number in the micro-batch; None: `varlen` reads it from the device, which waits.
    """
    seq, window = shape[1], kind.window
    cos = sin = None
    if kind.rope is not None and positions is not None:
        cos, sin = rotation(positions, kind.rope, kind.dtype)
    elif kind.rope is not None:
        cos, sin = fixed_rotation(seq, kind.rope, device, kind.dtype, kind.cached)
    if kind.kernel == "varlen":
        boundaries = row_boundaries(*shape, device) if positions is None else document_boundaries(positions, documents)
        return AttentionInputs(kind.kernel, cos, sin, boundaries=boundaries)
    if kind.kernel == "flex":
        return AttentionInputs(kind.kernel, cos, sin, block_mask=made_block_mask(shape, window, device, positions))
    mask = _mask(seq, seq + kind.cached, window, device, positions)
    if kind.kernel == "explicit":
        return AttentionInputs(kind.kernel, cos, sin, causal_mask(seq, seq, None, device) if mask is None else mask)
    if mask is not None:
        mask = added_to_scores(mask, kind.dtype) if positions is None else numbers_of(mask, kind.dtype)
    return AttentionInputs(kind.kernel, cos, sin, mask)


def _mask(queries: int, keys: int, window: int | None, device: torch.device, positions: Tensor | None) -> Tensor | None:
    """Returns the mask of the last `queries` of `keys` tokens, True where a token is seen; None: causal."""
    if positions is not None:
        return document_mask(positions, window)
    if window is not None:
        keys = min(keys, window + queries - 1)  # those that the window of the first query still contains
        window = window if window < keys else None
    if queries == 1 or (queries == keys and window is None):
        return None
    return causal_mask(queries, keys, window, device)
