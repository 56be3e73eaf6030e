"""The errors of this package, for what a user can correct, and the list of names that their sentences share."""

from collections.abc import Sequence


class DataError(ValueError):
    """Bad input. The message is one sentence: what is wrong, where, and what to do."""


class DataLimitError(DataError):
    """A limit of the machine or the encoder was met, not of the row: it must not decide which rows are left out."""


def first_names(names: Sequence[str]) -> str:
    """Lists names for a sentence: at most three, and how many more there are."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
