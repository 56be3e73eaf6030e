"""Which keys a token's query looks at: bool masks, True where it may.

A token sees itself and what came before it, in its own document only, and with a window no further back than
`window` tokens, itself included.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def document_mask(positions: Tensor, window: int | None = None) -> Tensor:
    """Inside documents, `[batch, 1, seq, seq]`; positions `[batch, seq]`, 0 at a start."""
    seq = positions.shape[1]
    document = (positions == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & causal_mask(seq, seq, window, positions.device)).unsqueeze(1)


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # a later step in training may find what generation left here
def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """`[queries, keys]` of the last `queries` of `keys` tokens, made once for all layers and steps."""
    newest = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(newest)
    return seen if window is None else seen.triu_(newest - window + 1)


@lru_cache(maxsize=2)  # tensors are told apart by identity
@torch.inference_mode(False)
def added_to_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A `causal_mask` as numbers, 0 or -inf: of a bool mask torch's attention makes them anew in every layer, and each
    layer keeps its own for backward."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
