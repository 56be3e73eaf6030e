"""The order of an epoch's blocks, and which documents are held out: computed, so that nothing is stored for them.

A Feistel network permutes the numbers of as many bits as the last index has, and a number that falls outside is sent
through it again, which ends inside after two passes on average or fewer. It can be run backwards. Indexes one at a
time and many at once have the same images.
"""

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_SALT = np.uint64(0x6D6567616C697465)  # "megalite", of the hash that holds documents out
_MASK64 = 2**64 - 1
RoundKeys = tuple[int, ...]


def epoch_key(seed: int, epoch: int, fingerprint: str) -> RoundKeys:
    """Returns the round keys of one epoch of one data set; the same on every machine and in every Python."""
    digest = hashlib.blake2b(f"megalite order 1|{seed}|{epoch}|{fingerprint}".encode(), digest_size=8 * _ROUNDS)
    return struct.unpack(f"<{_ROUNDS}Q", digest.digest())


def permuted_range(first: int, stop: int, size: int, key: RoundKeys) -> list[int]:
    """Returns the images of the indexes [first, stop), which takes much less time than one by one."""
    assert 0 <= first <= stop <= size, f"indexes [{first}, {stop}) outside [0, {size})"
    bits = (size - 1).bit_length()
    images = _encrypt(np.arange(first, stop, dtype=np.uint64), bits, key)
    outside = np.flatnonzero(images >= size)
    while len(outside):
        images[outside] = again = _encrypt(images[outside], bits, key)
        outside = outside[again >= size]
    return images.tolist()


def index_of_permuted(image: int, size: int, key: RoundKeys) -> int:
    """Returns the index whose image under the permutation of [0, size) that `key` defines is `image`."""
    assert 0 <= image < size, f"image {image} outside [0, {size})"
    bits = (size - 1).bit_length()
    index = _decrypt(image, bits, key)
    while index >= size:
        index = _decrypt(index, bits, key)
    return index


def _encrypt(values: NDArray[np.uint64], bits: int, key: RoundKeys) -> NDArray[np.uint64]:
    """Encrypts numbers of `bits` bits, each with an unbalanced Feistel network."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    spare = np.empty_like(values)
    for round_key in key:
        mixed = right ^ np.uint64(round_key)
        for shift, factor in MIXING:
            np.right_shift(mixed, shift, out=spare)
            np.bitwise_xor(mixed, spare, out=mixed)
            if factor is not None:
                np.multiply(mixed, factor, out=mixed)
        np.bitwise_and(mixed, np.uint64((1 << left_bits) - 1), out=mixed)
        np.bitwise_xor(mixed, left, out=mixed)
        left, right = right, mixed
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _decrypt(value: int, bits: int, key: RoundKeys) -> int:
    """Inverts `_encrypt`; the number of rounds is even, so both halves have their widths again at its end."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = value >> right_bits, value & ((1 << right_bits) - 1)
    for round_key in reversed(key):
        left_bits, right_bits = right_bits, left_bits
        left, right = right ^ (mix64(left ^ round_key) & ((1 << left_bits) - 1)), left
    return (left << right_bits) | right


def mix64(value: int) -> int:
    """Applies the finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


MIXING = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), None),
)
"""The steps of `mix64` for arrays: a shift that is added modulo 2, then a factor."""


def is_held_out(documents: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Returns [documents] bools: True where the document's hash, as a number in [0, 1), is below `fraction`.

    The hash is `mix64`, applied twice.
    """
    if not fraction:
        return np.zeros(len(documents), dtype=np.bool_)
    hashes = documents ^ _SALT
    spare = np.empty_like(hashes)
    for shift, factor in (*MIXING, *MIXING):
        np.right_shift(hashes, shift, out=spare)
        np.bitwise_xor(hashes, spare, out=hashes)
        if factor is not None:
            np.multiply(hashes, factor, out=hashes)
    below: NDArray[np.bool_] = hashes < np.uint64(int(fraction * 2**64))
    return below
