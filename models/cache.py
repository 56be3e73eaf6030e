"""Keys and values of the tokens so far, for generation: each token is computed once.

In: rotated keys and values of new tokens, `[batch, kv_heads/tp, new, head_dim]`. Out: those of all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """What one attention layer of one rank remembers; all sequences of the batch are equally long."""

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._keys = torch.empty(batch, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self.capacity = capacity
        self.length = 0  # tokens so far

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values `[batch, kv_heads, new, head_dim]` -> those of all tokens so far, the new ones last.

        What comes back, `[batch, kv_heads, length, head_dim]`, are views that later calls leave as they are.
        """
        start, self.length = self.length, self.length + keys.shape[2]
        assert self.length <= self.capacity, f"{self.length} tokens in a cache for {self.capacity}"
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]
