"""Masks of attention, and boundaries of documents: which tokens a token sees, in the form that each kernel reads.

In: positions `[batch, seq]`, 0 where a document starts, and windows in tokens, the query's own among them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def document_mask(positions: Tensor, window: int | None = None, queries: int | None = None) -> Tensor:
    """Returns the causal mask within documents of the last `queries` tokens, or of all, `[batch, 1, queries, seq]`."""
    seq = positions.shape[1]
    queries = queries or seq
    document = (positions == 0).cumsum(dim=1)
    same = document[:, -queries:].unsqueeze(2) == document.unsqueeze(1)
    return (same & causal_mask(queries, seq, window, positions.device)).unsqueeze(1)


@lru_cache(maxsize=8)  # two chunks of a rank, with a window and without
@torch.inference_mode(False)  # training may reuse a mask that generation has cached
def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns `[queries, keys]` for the last `queries` of `keys` tokens, made once for all layers and steps."""
    newest = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(newest)
    return seen if window is None else seen.triu_(newest - window + 1)


def numbers_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a mask to 0 or -inf: from a bool mask torch's attention makes these anew in every layer, and each layer
    keeps its own for backward."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


added_to_scores = lru_cache(maxsize=4)(torch.inference_mode(False)(numbers_of))  # by the identity of a `causal_mask`


def count_documents(positions: Tensor) -> Tensor:
    """Counts the documents of positions `[batch, seq]`; every row begins with a new one."""
    return (positions[:, 1:] == 0).sum() + len(positions)


def document_boundaries(positions: Tensor, documents: int | None) -> Tensor:
    """Returns the first token of each document, counted through all rows, and the number of tokens, int32.

    Empty documents at the end make their number a power of two, or the number of tokens: compiled blocks have a graph
    for every number.
    """
    count = int(count_documents(positions)) if documents is None else documents
    starts = positions == 0
    starts[:, 0] = True
    total = positions.numel()
    tokens = torch.arange(total, dtype=torch.int32, device=positions.device)
    # sorted instead of looked up, because the number of those found would have to be read from the device
    found = torch.where(starts.flatten(), tokens, total).sort().values
    power = 1 << (count - 1).bit_length()
    return F.pad(found, (0, 1), value=total)[: min(power, total) + 1]


def query_boundaries(keys: Tensor, queries: int, end: int) -> Tensor:
    """Returns the boundaries of the last `queries` of each row's `end` tokens, from those of all of them: a document
    that ends before them has no queries."""
    if queries == end:
        return keys
    row = keys // end
    return (row * queries + (keys - row * end - (end - queries)).clamp_(min=0)).to(torch.int32)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def row_boundaries(batch: int, seq: int, device: torch.device) -> Tensor:
    """Caches the boundaries of rows that are one document each."""
    return torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=device)


def made_block_mask(
    shape: tuple[int, int, int], window: int | None, device: torch.device, positions: Tensor | None
) -> BlockMask:
    """Returns FlexAttention's mask of [batch, queries, keys]: which blocks of 128 x 128 scores exist; no tensor of all
    scores is made."""
    if positions is None:
        return _causal_block_mask(*shape[1:], window, device)
    document = (positions == 0).cumsum(dim=1)
    return _create_block_mask(shape, window, device, document)


@lru_cache(maxsize=4)
def _causal_block_mask(queries: int, keys: int, window: int | None, device: torch.device) -> BlockMask:
    return _create_block_mask((1, queries, keys), window, device, None)


def _create_block_mask(
    shape: tuple[int, int, int], window: int | None, device: torch.device, document: Tensor | None
) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, queries, keys = shape
    first = keys - queries

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + first
        seen = query >= key
        if window is not None:
            seen &= query - key < window
        return seen if document is None else seen & (document[row, query] == document[row, key])

    # not compiled it makes all scores' places first
    make = create_block_mask if device.type == "cpu" else torch.compile(create_block_mask)
    rows = None if document is None else batch
    made: BlockMask = make(is_seen, rows, None, queries, keys, device=str(device))
    return made
