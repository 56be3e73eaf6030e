"""One document of a source, as everything that reads and cuts it passes it on, and rows that hold none."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from data_pipeline.errors import DataError, DataLimitError

_REMEMBERED = 1000
_SHOWN = 500  # characters of a message, which may name every field of a row

OnBadRow = Callable[[DataError], None]
"""Takes the sentence about a row that holds no document; the row is left out if it returns."""


class Document(NamedTuple):
    """The text of one document, or of a stretch of it, in blocks that are read one after the other."""

    where: str  # file and line, or row, for a sentence
    blocks: Iterable[str]
    begins: bool = True  # False: what is before the blocks is read by itself
    ends: bool = True  # False: what follows the blocks is read by itself


def refuse_bad_row(error: DataError) -> None:
    raise error


class BadRows:
    """Counts the bad rows of one reading of the sources, and keeps the sentences about the first ones."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: list[str] = []

    def __call__(self, error: DataError) -> None:
        if isinstance(error, DataLimitError):
            raise error
        if not self.skip:
            raise DataError(f"{error}, or leave such rows out with --on-bad-row skip") from error
        self.count += 1
        if len(self.first) < _REMEMBERED:
            self.first.append(" ".join(str(error)[:_SHOWN].split()))
