"""Inputs of attention beside hidden states: angles, masks and boundaries of documents.

In: the positions of a micro-batch, `[batch, seq]`, 0 where a document starts, or None if each row is one document. Out:
`AttentionInputs`, made once per micro-batch for all layers of one kind, so that no layer builds a mask of its own. A
rank that holds two chunks of a sequence attends from each apart, to the keys up to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from megalite.parallel.collectives import ContextParallel
from megalite.parallel.context import own_spans, sequence_places
from models.attention_masks import (
    added_to_scores,
    causal_mask,
    document_boundaries,
    document_mask,
    made_block_mask,
    numbers_of,
    query_boundaries,
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


class Seen(NamedTuple):
    """The keys that some queries, of consecutive tokens, attend to: those of the tokens up to the last query."""

    end: int  # number of tokens in the sequence up to the last query
    # [(batch, 1,) queries, keys]: True where a token is seen for `explicit`, 0 or -inf for `fused`; None: causal
    mask: Tensor | None = None
    boundaries: Tensor | None = None  # [documents or more + 1] int32, of the queries of all rows, for `varlen`
    key_boundaries: Tensor | None = None  # the same of their keys
    block_mask: BlockMask | None = None  # for `flex`


class AttentionInputs(NamedTuple):
    """Tensors that the attention of all layers of a kind shares in a micro-batch."""

    kernel: Kernel
    cos: Tensor | None  # [batch|1, seq/cp, 1, pairs]; None: nothing is rotated
    sin: Tensor | None
    seen: tuple[Seen, ...]  # by this rank's chunks of a sequence


def attention_inputs(
    kind: AttentionKind,
    shape: tuple[int, int],
    device: torch.device,
    positions: Tensor | None,
    documents: int | None,
    cp: ContextParallel,
) -> AttentionInputs:
    """Makes the inputs of layers of `kind` for a micro-batch of `shape` [batch, seq] of whole sequences.

    documents: their number in the micro-batch; None: `varlen` reads it from the device, which waits.
    """
    seq = shape[1]
    cos = sin = None
    if kind.rope is not None and positions is not None:
        cos, sin = rotation(positions, kind.rope, kind.dtype)
    elif kind.rope is not None:
        cos, sin = fixed_rotation(seq, kind.rope, device, kind.dtype, kind.cached)
    if cp.size > 1 and cos is not None and sin is not None:
        places = sequence_places(seq, cp, device)
        cos, sin = cos[:, places], sin[:, places]
    # of heads, for which tokens are exchanged, this rank has whole sequences
    spans = own_spans(seq, cp) if cp.size > 1 and cp.kind == "all_gather" else (range(seq),)
    seen = tuple(_seen(kind, shape[0], span, device, positions, documents) for span in spans)
    return AttentionInputs(kind.kernel, cos, sin, seen)


def _seen(
    kind: AttentionKind,
    batch: int,
    span: range,
    device: torch.device,
    positions: Tensor | None,
    documents: int | None,
) -> Seen:
    """Returns what the queries at the places `span` see."""
    queries, end, window = len(span), span.stop + kind.cached, kind.window
    if kind.cached and window is not None:
        end = min(end, window + queries - 1)  # those that the window of the first query still contains
    positions = None if positions is None else positions[:, :end]
    if kind.kernel == "varlen":
        keys = row_boundaries(batch, end, device) if positions is None else document_boundaries(positions, documents)
        return Seen(end, boundaries=query_boundaries(keys, queries, end), key_boundaries=keys)
    if kind.kernel == "flex":
        return Seen(end, block_mask=made_block_mask((batch, queries, end), window, device, positions))
    mask = _mask(queries, end, window, device, positions)
    if kind.kernel == "explicit":
        return Seen(end, causal_mask(queries, end, None, device) if mask is None else mask)
    if mask is not None:
        mask = added_to_scores(mask, kind.dtype) if positions is None else numbers_of(mask, kind.dtype)
    return Seen(end, mask)


def _mask(queries: int, keys: int, window: int | None, device: torch.device, positions: Tensor | None) -> Tensor | None:
    """Returns the mask of the last `queries` of `keys` tokens, True where a token is seen; None: causal."""
    if positions is not None:
        return document_mask(positions, window, queries)
    window = window if window is not None and window < keys else None
    if queries == 1 or (queries == keys and window is None):
        return None
    return causal_mask(queries, keys, window, device)
