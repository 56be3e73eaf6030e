"""The interface of codecs: flat fp32 numbers in, bytes for each rank out. Pure functions of tensors.

A vector is cut into one part for each rank, and a part into pieces, one for each parameter that it overlaps. No scale
and no choice of a codec reaches over the end of a piece: tensor-parallel ranks hold some parameters alike among others
that they do not, and must decode the same numbers of those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor

Pieces = Sequence[Sequence[int]]  # the lengths of each part's pieces; parts are equally long
ALIGNMENT = 8  # bytes, so that what lies in a message can be read in place


class Codec(ABC):
    """Encodes vectors of one cut."""

    sizes: list[int]  # bytes of the message about each part

    @abstractmethod
    def encode(self, numbers: Tensor) -> Tensor:
        """Returns the messages, uint8, behind each other, about `numbers`, fp32 and flat, which become what the
        messages leave out: the decoded numbers and these add up to those that were there.

        What is not finite is not finite when it is decoded either, and what is left of its piece may be anything.
        """

    @abstractmethod
    def add_decoded(self, message: Tensor, part: int, out: Tensor) -> None:
        """Adds what one message says about a part to `out`, fp32 and of the part's length."""


def aligned(size: int) -> int:
    """Returns the size of a message with so many bytes in it."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pieces_of(slices: Iterable[tuple[int, int]], size: int, parts: int) -> list[list[int]]:
    """Returns the lengths of the pieces of each of `parts` equal parts of a flat tensor, with the parameters and the
    padding that lie in it."""
    length = size // parts
    cuts = sorted({each for ends in slices for each in ends} | {length * part for part in range(parts + 1)})
    found: list[list[int]] = [[] for _ in range(parts)]
    for start, stop in pairwise(cuts):
        found[start // length].append(stop - start)
    return found
