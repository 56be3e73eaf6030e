"""Codes of 8 or 4 bits with one scale for up to 256 neighbours, rounded to the nearest."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from megalite.config.compression import BLOCK
from megalite.engine.compression.codec import Codec, Pieces, aligned


class BlockCodec(Codec):
    """A message is the scales of a part's blocks in fp32, then its codes, those of 4 bits two in a byte.

    A scale is the largest magnitude over the largest code, so a number is told to half a scale. A block with NaN or an
    infinite number has such a scale, and all of it is NaN when it is decoded.
    """

    def __init__(self, pieces: Pieces, bits: int, device: torch.device) -> None:
        self._bits, self._largest = bits, float(2 ** (bits - 1) - 1)
        by_part = [list(chain.from_iterable(map(_blocks_of, part))) for part in pieces]
        self._blocks = [torch.tensor(blocks, dtype=torch.int64, device=device) for blocks in by_part]
        self._all_blocks = torch.cat(self._blocks)
        self._length = sum(pieces[0])
        self._code_bytes = -(-self._length * bits // 8)
        self.sizes = [aligned(4 * len(blocks) + self._code_bytes) for blocks in by_part]

    def encode(self, numbers: Tensor) -> Tensor:
        largest = torch.segment_reduce(numbers.abs(), "max", lengths=self._all_blocks, unsafe=True)
        scales = largest / self._largest
        wide = self._spread(scales, self._all_blocks)
        codes = torch.where(wide > 0, numbers / wide, 0.0).nan_to_num_(0.0, 0.0, 0.0).round_()
        codes.clamp_(-self._largest, self._largest)  # a subnormal scale may be rounded by half of itself
        numbers.addcmul_(codes, wide, value=-1.0)
        packed = self._pack(codes.to(torch.int8).view(len(self.sizes), -1))
        parts = list[Tensor]()
        for own, row, size in zip(scales.split([len(one) for one in self._blocks]), packed, self.sizes, strict=True):
            content = [own.view(torch.uint8), row]
            parts += [*content, row.new_zeros(size - sum(map(len, content)))]
        return torch.cat(parts)

    def add_decoded(self, message: Tensor, part: int, out: Tensor) -> None:
        blocks = self._blocks[part]
        start = 4 * len(blocks)
        codes = self._unpack(message[start : start + self._code_bytes])
        out.addcmul_(codes.float(), self._spread(message[:start].view(torch.float32), blocks))

    def _spread(self, scales: Tensor, blocks: Tensor) -> Tensor:
        count = self._length * (len(self.sizes) if blocks is self._all_blocks else 1)
        return scales.repeat_interleave(blocks, output_size=count)

    def _pack(self, codes: Tensor) -> Tensor:
        """`[parts, length]` int8 to `[parts, code_bytes]` uint8."""
        if self._bits == 8:
            return codes.view(torch.uint8)
        nibbles = torch.nn.functional.pad(codes, (0, self._length % 2)).view(torch.uint8) & 15
        return nibbles[:, 0::2] | nibbles[:, 1::2] << 4

    def _unpack(self, packed: Tensor) -> Tensor:
        if self._bits == 8:
            return packed.view(torch.int8)
        nibbles = torch.stack([packed << 4, packed & 240], dim=1).flatten()[: self._length]
        return nibbles.view(torch.int8) >> 4  # with the sign


def _blocks_of(length: int) -> list[int]:
    full, rest = divmod(length, BLOCK)
    return [BLOCK] * full + [rest] * (rest > 0)
