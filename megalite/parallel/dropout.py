"""Dropout whose mask is a pure function of (seed, site, sample, head, position, feature): the same on every layout.

A site is a `Dropout` module's canonical path, a sample id the sample's position in the data. The mask is hashed from
them, not drawn from a generator, so a rank computes only the part that it holds, recomputation produces the same mask
with no state to restore, CPU and GPU agree to the bit, and nothing waits for the device. In and out:
hidden states `[batch, seq/cp(/tp), hidden]`, or attention probabilities `[batch, heads/tp, seq, seq]`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megalite.parallel.collectives import TensorParallel
from megalite.parallel.context import own_places

# splitmix64 (Steele 2014): its increment, and factors and shifts of its finalizer
INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
MIXER = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
LAST_SHIFT = 31
# factors of 32-bit finalizers (Wellons 2018); its test says that three are enough for a mask
WORD_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32), 0x31848BAB)
WORDS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 25}  # 8 bytes of memory for each: in a CPU's cache, and 256 MiB


class Dropout(nn.Module):
    """Zeroes elements at `rate` and scales the others by 1/(1-rate), in training mode only.

    `make_layer` sets its seed and site, as it sets a parameter's name.
    """

    def __init__(self, rate: float, tp: TensorParallel) -> None:
        super().__init__()
        self.rate, self.scale, self.tp = rate, 1.0 / (1.0 - rate), tp
        self._site: int | None = None

    def set_site(self, seed: int, path: str) -> None:
        """Sets the run's seed and the module's path in the model; required before the first use in training."""
        digest = hashlib.blake2b(f"dropout/{seed}/{path}".encode(), digest_size=8).digest()
        self._site = int.from_bytes(digest, "little", signed=True)

    @property
    def is_active(self) -> bool:
        """False where the module is the identity."""
        return self.training and self.rate > 0

    def forward(self, hidden: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Drops in place from `[batch, seq(/tp), hidden]`, the output of a GEMM or a lookup that nothing else reads.

        sample_ids `[batch]` int64; may be None while dropout is not active.
        """
        if not self.is_active:
            return hidden
        places = own_places(hidden.shape[1], self.tp, hidden.device)
        dropped = self._dropped(sample_ids, (places,), hidden.shape[2])
        return hidden.masked_fill_(dropped, 0.0).mul_(self.scale)

    def probabilities(self, probabilities: Tensor, sample_ids: Tensor | None, head: int, place: int) -> Tensor:
        """Drops from `[batch, heads, queries, keys]` without scaling: to scale the values they weigh is cheaper.

        head, place: of the first query in the model and in its sequence.
        """
        heads, rows, columns = probabilities.shape[1:]
        device = probabilities.device
        indices = (torch.arange(at, at + count, device=device) for at, count in ((head, heads), (place, rows)))
        dropped = self._dropped(sample_ids, indices, columns)
        return probabilities.masked_fill(dropped, 0.0)

    def _dropped(self, sample_ids: Tensor | None, indices: Iterable[Tensor], columns: int) -> Tensor:
        """Returns the mask of elements to zero, bool `[batch, *indices, columns]`."""
        assert sample_ids is not None, "dropout in training needs the sample ids in the input"
        assert self._site is not None, "make_layer has not set the site of this dropout"
        keys = _mixed(sample_ids * INCREMENT + self._site)  # [batch]
        for numbers in indices:
            keys = _mixed(keys.unsqueeze(-1) + numbers * INCREMENT)  # [batch, *indices]
        threshold = min(round(self.rate * 2**32), 2**32 - 1) - 2**31  # of signed words
        if torch.compiler.is_compiling():
            return _words(keys, columns) < threshold
        dropped = torch.empty((*keys.shape, columns), dtype=torch.bool, device=keys.device)
        rows = max(1, WORDS_AT_ONCE["cpu" if keys.device.type == "cpu" else "cuda"] // columns)
        for some, out in zip(keys.flatten().split(rows), dropped.view(-1, columns).split(rows), strict=True):
            torch.lt(_words(some, columns), threshold, out=out)
        return dropped


def _mixed(x: Tensor) -> Tensor:
    """Applies splitmix64's finalizer in place: a bijection of int64 after which every bit depends on every other."""
    for shift, factor in MIXER:
        x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, LAST_SHIFT))


def _words(keys: Tensor, count: int) -> Tensor:
    """Returns `count` uniform signed 32-bit words for each int64 key, `[..., count]`; in place, because it is large."""
    key, other = keys.unsqueeze(-1).view(torch.int32).split(1, dim=-1)  # its halves
    x = torch.arange(count, dtype=torch.int32, device=keys.device) ^ key
    first, second, third = WORD_FACTORS
    x.mul_(first)
    x.bitwise_xor_(_shifted(x, 16)).add_(other).mul_(second)
    return x.bitwise_xor_(_shifted(x, 15)).mul_(third)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Shifts right logically; torch's shift copies the sign."""
    bits = 8 * x.element_size()
    return (x >> shift).bitwise_and_((1 << (bits - shift)) - 1)
