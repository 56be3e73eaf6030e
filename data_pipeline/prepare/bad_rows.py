"""Rows that hold no document: counted and left out, or the end of a `prepare`."""

from data_pipeline.errors import DataError, DataLimitError

_REMEMBERED = 1000
_SHOWN = 500  # characters of a message, which may name every field of a row


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
