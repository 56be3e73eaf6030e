"""The order of an epoch: a permutation of [0, size) that is computed, never stored.

A Feistel network on ceil(log2(size)) bits is a bijection of [0, 2**bits) whatever its round function; values
that fall outside [0, size) walk on along their cycle until they are inside (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002), fewer than two steps on average. The halves differ by one bit where the
number of bits is odd, and swap widths in every round; the number of rounds is even, so the widths are back at
the end.

The scalar and the vectorised form share every line of arithmetic: Python integers and uint64 arrays give the
same.
"""

import hashlib
import struct
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK64 = 2**64 - 1
RoundKeys = tuple[int, ...]
_Integers = TypeVar("_Integers", int, NDArray[np.uint64])


def epoch_key(seed: int, epoch: int, fingerprint: str) -> RoundKeys:
    """The round keys of one epoch of one data set; the same on every machine and in every Python."""
    digest = hashlib.blake2b(f"megalite order 1|{seed}|{epoch}|{fingerprint}".encode(), digest_size=8 * _ROUNDS)
    return struct.unpack(f"<{_ROUNDS}Q", digest.digest())


def permuted_index(index: int, size: int, key: RoundKeys) -> int:
    """Where the permutation of [0, size) under `key` sends `index`."""
    assert 0 <= index < size, f"index {index} outside [0, {size})"
    bits = (size - 1).bit_length()
    index = _encrypt(index, bits, key)
    while index >= size:
        index = _encrypt(index, bits, key)
    return index


def permuted_indices(indices: NDArray[np.integer[Any]], size: int, key: RoundKeys) -> NDArray[np.int64]:
    """`permuted_index` of every element of `indices`."""
    assert len(indices) == 0 or (int(indices.min()) >= 0 and int(indices.max()) < size), f"indices outside [0, {size})"
    bits = (size - 1).bit_length()
    values = _encrypt(indices.astype(np.uint64), bits, key)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        values[outside] = _encrypt(values[outside], bits, key)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _encrypt(value: _Integers, bits: int, key: RoundKeys) -> _Integers:
    left_bits, right_bits = bits // 2, bits - bits // 2
    left: Any = value >> right_bits
    right: Any = value & ((1 << right_bits) - 1)
    for round_key in key:
        left, right = right, left ^ (mix64(right ^ round_key) & ((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    joined: _Integers = (left << right_bits) | right
    return joined


def mix64(value: _Integers) -> _Integers:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x: Any = value
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    mixed: _Integers = x ^ (x >> 31)
    return mixed
