"""The lines that a run has added to one of its files since somebody looked last.

In: a file, and where the last look ended. Out: the lines since then, or all of them where the file has been written
anew, as a rollback and a resumed session do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from megalite.checkpoint.safe_files import read_from
from megalite.monitor.line_files import LONGEST_LINE_BYTES

MOST_BYTES = 4 << 20  # of one look; the next one goes on from there
MARK_BYTES = 64  # before an offset, which tell whether the file is still the one that was read
CURSOR = re.compile(r"0|([1-9][0-9]{0,15})-([0-9a-f]{16})")


@dataclass(frozen=True)
class Cursor:
    """A place behind a line of a file: its offset in bytes, and a digest of what stands before it.

    The digest tells a file that was cut and has grown beyond the offset again from one that has only grown: lines end
    with the time, or with numbers that no two steps share.
    """

    offset: int = 0
    mark: str = ""

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Reads what `str` has made. Raises ValueError for everything else."""
        found = CURSOR.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no place in a file: 0, or the `next` of an earlier answer")
        return cls() if text == "0" else cls(int(found[1]), found[2])

    def __str__(self) -> str:
        return f"{self.offset}-{self.mark}" if self.offset else "0"


@dataclass(frozen=True)
class Added:
    """The whole lines behind a cursor, without their ends."""

    lines: list[str]
    next: Cursor
    is_anew: bool  # the file is another one than before: forget its earlier lines
    has_more: bool = False  # look again at once

    @classmethod
    def read(cls, path: Path, cursor: Cursor) -> Added:
        """Reads on from `cursor`, or from the start if the file is shorter now or was written anew.

        A file that is missing has no lines. Raises OSError where it cannot be read.
        """
        try:
            return cls._on(path, cursor) or cls._on(path, Cursor(), is_anew=True) or cls([], Cursor(), True)
        except FileNotFoundError:
            return cls([], Cursor(), is_anew=cursor.offset > 0)

    @classmethod
    def _on(cls, path: Path, cursor: Cursor, *, is_anew: bool = False) -> Added | None:
        """Reads on from `cursor`; None if it belongs to another state of the file."""
        before = min(cursor.offset, MARK_BYTES)
        data, size = read_from(path, cursor.offset - before, before + MOST_BYTES)
        if cursor.offset > size or (cursor.offset and _digest(data[:before]) != cursor.mark):
            return None
        end = data.rfind(b"\n", before) + 1
        if end == 0 and len(data) - before >= LONGEST_LINE_BYTES:
            end = len(data)  # no run writes such a line: it is passed over
        if end == 0:
            return cls([], cursor, is_anew)
        following = cursor.offset - before + end
        lines = data[before:end].decode("utf-8", "replace").split("\n")
        mark = _digest(data[max(0, end - MARK_BYTES) : end])
        return cls([line for line in lines if line], Cursor(following, mark), is_anew, following < size)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
