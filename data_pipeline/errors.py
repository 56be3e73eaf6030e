"""The one error of this room: what a user can put right."""


class DataError(ValueError):
    """Bad input, in one sentence: what is wrong, where, and what to do."""
