"""Quantities of another stack's files, and what is derived from them on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megalite.config.errors import shown
from megalite.config.foreign_words import Kind

Options = dict[str, Any]
LARGEST = 10**18  # a larger number is a typing error


@dataclass
class Quantities:
    """Values by quantity, each with the word that gave it; the last one wins."""

    values: dict[str, tuple[Any, str]]
    kind: Kind

    def put(self, name: str, value: Any, word: str) -> None:
        """Sets a quantity to the value of a word."""
        self.values[name] = value, word

    def get(self, name: str) -> Any:
        """Returns the value, or None."""
        return self.values.get(name, (None, ""))[0]

    def word(self, name: str) -> str:
        """Returns the word that gave it."""
        return self.values.get(name, (None, name))[1]


@dataclass
class Derivation:
    """Options, contradictions and explanations, as one subject after the other adds them."""

    given: Quantities
    options: Options
    """All options that are known, those of the tables included."""
    derived: Options = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    replicas: int | None = None
    """Number of replicas on the devices of the files; the config leaves it `auto`."""
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    """Word, value and explanation of what is another thing here."""

    def number(self, name: str) -> Any:
        """Returns a quantity as a number above 0, or None; a value that is none is a problem."""
        value = self.given.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        if not is_number:
            self.problems.append(f"{self.given.word(name)} {shown(value)} must be a number")
            return None
        return value if value > 0 else None

    def size(self, option: str) -> int:
        """Returns the size that an option has so far; 1 where it has none, or none that is possible."""
        value = self.options.get(option)
        return value if isinstance(value, int) and 0 < value <= LARGEST else 1

    def set(self, option: str, value: Any) -> None:
        """Sets an option, also for what is derived after it; one that is stated by hand stays."""
        self.derived[option] = value
        self.options.setdefault(option, value)

    def note(self, name: str, here: str) -> None:
        """Adds an explanation of a quantity."""
        value, word = self.given.values.get(name, (None, name))
        self.notes.append((word, "" if value is None else shown(value), here))
