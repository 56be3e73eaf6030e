"""The one error of this package, for what a user can correct."""


class DataError(ValueError):
    """Bad input. The message is one sentence: what is wrong, where, and what to do."""
