"""Keys and values of earlier tokens, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of earlier tokens, for one attention layer of one rank; all sequences are equally long."""

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._keys = torch.empty(batch, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self.capacity = capacity
        self.length = 0  # tokens so far

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values `[batch, kv_heads, new, head_dim]` and returns those of all tokens so far.

        The results `[batch, kv_heads, length, head_dim]` are views that later calls do not change.
        """
        start, self.length = self.length, self.length + keys.shape[2]
        assert self.length <= self.capacity, f"{self.length} tokens in a cache for {self.capacity}"
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]
