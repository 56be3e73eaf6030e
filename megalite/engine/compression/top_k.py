"""The largest of each piece: places and values, the values in bf16."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.config.compression import ENTRY_BYTES
from megalite.engine.compression.codec import Codec, Pieces, aligned


class TopKCodec(Codec):
    """A message is the places in the part, int32, then the values. NaN is larger than all numbers."""

    def __init__(self, pieces: Pieces, density: float, device: torch.device) -> None:
        """At least one number of each piece is sent, so that none waits for ever."""
        self._pieces = [[(length, math.ceil(density * length)) for length in part] for part in pieces]
        self._counts = [sum(count for _, count in part) for part in self._pieces]
        self._length, self._device = sum(pieces[0]), device
        self.sizes = [aligned(ENTRY_BYTES * count) for count in self._counts]

    def encode(self, numbers: Tensor) -> Tensor:
        messages = list[Tensor]()
        for part, pieces, size in zip(numbers.view(len(self.sizes), -1), self._pieces, self.sizes, strict=True):
            places, start = list[Tensor](), 0
            for length, count in pieces:
                chosen = part[start : start + length].abs().topk(count, sorted=False).indices
                places.append(chosen + start)
                start += length
            where = torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device=self._device)
            values = part[where].bfloat16()
            part[where] -= values.float()
            content = [where.int().view(torch.uint8), values.view(torch.uint8)]
            messages += [*content, content[0].new_zeros(size - sum(map(len, content)))]
        return torch.cat(messages)

    def add_decoded(self, message: Tensor, part: int, out: Tensor) -> None:
        start, count = 4 * self._counts[part], self._counts[part]
        where = message[:start].view(torch.int32).long()
        out[where] += message[start : start + 2 * count].view(torch.bfloat16).float()  # no place is there twice
