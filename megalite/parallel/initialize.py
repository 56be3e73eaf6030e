"""Initial weights as a pure function of (seed, canonical name, global index): the same on every layout, bit for bit.

A global tensor is drawn in blocks of rows, each block from its own counter-based stream (numpy's Philox, whose bits
do not depend on the machine), so a rank draws only the blocks it holds and never a whole tensor.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from megalite.parallel.shard import Shard, ShardPiece

BLOCK_ROWS = 256


@torch.no_grad()
def initialize_(parameter: Tensor, shard: Shard, seed: int, std: float) -> None:
    """Fills `parameter` (this rank's `shard`) in place: padding with zero, the rest by the shard's initializer."""
    if shard.initializer == "ones":
        parameter.fill_(1.0)
        return
    parameter.zero_()
    if shard.initializer == "normal":
        for piece in shard.pieces():
            parameter[piece.target].copy_(torch.from_numpy(_normal(piece, seed) * np.float32(std)))


def _normal(piece: ShardPiece, seed: int) -> np.ndarray:
    """Draws the piece's block of its global standard-normal tensor, float32."""
    rows, rest = piece.source[0], piece.source[1:]
    row_shape = piece.shape[1:]
    blocks = []
    for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        count = min(BLOCK_ROWS, piece.shape[0] - first)
        key = hashlib.blake2b(f"{seed}/{piece.name}/{block}".encode(), digest_size=16).digest()
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        drawn = stream.standard_normal((count, *row_shape), dtype=np.float32)
        inside = slice(max(rows.start - first, 0), min(rows.stop - first, count))
        blocks.append(drawn[(inside, *rest)])
    return np.concatenate(blocks)
