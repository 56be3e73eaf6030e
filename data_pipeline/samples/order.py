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
RoundKeys = tuple[int, ...]


def epoch_key(seed: int, epoch: int, fingerprint: str) -> RoundKeys:
    """Returns the round keys of one epoch of one data set; the same on every machine and in every Python."""
    digest = hashlib.blake2b(f"megalite order 1|{seed}|{epoch}|{fingerprint}".encode(), digest_size=8 * _ROUNDS)
    return struct.unpack(f"<{_ROUNDS}Q", digest.digest())


def permuted_range(first: int, stop: int, size: int, key: RoundKeys) -> list[int]:
    """Returns the images of the indexes [first, stop), which takes much less time than one by one."""
    assert 0 <= first <= stop <= size, f"indexes [{first}, {stop}) outside [0, {size})"
    bits = (size - 1).bit_length()
    images = _permuted(np.arange(first, stop, dtype=np.uint64), bits, key)
    outside = np.flatnonzero(images >= size)
    while len(outside):
        images[outside] = again = _permuted(images[outside], bits, key)
        outside = outside[again >= size]
    return images.tolist()


def index_of_permuted(image: int, size: int, key: RoundKeys) -> int:
    """Returns the index whose image under the permutation of [0, size) that `key` defines is `image`."""
    assert 0 <= image < size, f"image {image} outside [0, {size})"
    index, bits = np.array([image], dtype=np.uint64), (size - 1).bit_length()
    while True:
        index = _permuted(index, bits, key, backwards=True)
        if index[0] < size:
            return int(index[0])


def _permuted(values: NDArray[np.uint64], bits: int, key: RoundKeys, *, backwards: bool = False) -> NDArray[np.uint64]:
    """Sends numbers of `bits` bits through an unbalanced Feistel network, or back.

    The number of rounds is even, so both halves have their widths again at the end. Back, they change places.
    """
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    if backwards:
        left, right, left_bits, right_bits = right, left, right_bits, left_bits
    spare = np.empty_like(values)
    for round_key in reversed(key) if backwards else key:
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
    return (right << np.uint64(left_bits)) | left if backwards else (left << np.uint64(right_bits)) | right


MIXING = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), None),
)
"""The finaliser of splitmix64 (Steele, Lea, Flood 2014), by which every input bit affects every output bit: in each
step a shift that is added modulo 2, then a factor."""


def is_held_out(documents: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Returns [documents] bools: True where the document's hash, as a number in [0, 1), is below `fraction`.

    The hash is the finaliser of splitmix64, applied twice.
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
