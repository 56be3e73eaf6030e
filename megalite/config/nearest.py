"""Which option was meant: the nearest one to a name that does not exist, in its own section or another.

In: the unknown path, e.g. ("training", "learning_rate"). Out: ("optimizer", "learning_rate").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

OptionPath = tuple[str, ...]

ELSEWHERE = 1.5
"""What being in another section costs, in letters: a typo here wins over a namesake elsewhere."""


def dotted(path: OptionPath) -> str:
    """("training", "steps") -> "training.steps"."""
    return ".".join(path)


@cache
def option_paths(model: type[BaseModel]) -> tuple[OptionPath, ...]:
    """Every section and option of the config, in the order of the files."""

    def walk(section: type[BaseModel], prefix: OptionPath) -> Iterator[OptionPath]:
        for name, field in section.model_fields.items():
            yield (*prefix, name)
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from walk(field.annotation, (*prefix, name))

    return tuple(walk(model, ()))


def nearest_option(unknown: OptionPath, value: Any, model: type[BaseModel]) -> tuple[OptionPath, OptionPath] | None:
    """(what was typed, what was meant), or None where nothing is near.

    An unknown section is compared with sections; if none is near, the first option inside it is looked up:
    `train.learning_rate` is answered with `optimizer.learning_rate`.
    """
    paths = option_paths(model)
    sections = [path for path in paths if len(path) == 1 or any(other[:-1] == path for other in paths)]
    while isinstance(value, dict) and value:
        if best := _best(unknown, sections):
            return unknown, best
        name, value = next(iter(value.items()))
        unknown = (*unknown, str(name))
    best = _best(unknown, paths)
    return (unknown, best) if best else None


def nearest_name(typed: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, or None where nothing is near."""
    best = _best((typed,), [(name,) for name in sorted(names)])
    return best[0] if best else None


def _best(unknown: OptionPath, candidates: Iterable[OptionPath]) -> OptionPath | None:
    costs = [(cost, path) for path in candidates if (cost := _cost(unknown, path)) is not None]
    return min(costs, key=lambda pair: pair[0])[1] if costs else None


def _cost(typed: OptionPath, option: OptionPath) -> float | None:
    """How far apart two options are, in letters; None where nobody would mistake one for the other."""
    letters = _name_distance(typed[-1], option[-1])
    if letters > max(1, len(option[-1]) // 3):
        return None
    sections = edit_distance(dotted(typed[:-1]), dotted(option[:-1]))
    return letters + min(ELSEWHERE, sections)


def _name_distance(typed: str, name: str) -> float:
    """Edit distance, except that initials (`lr`) and whole words (`batch_size`) count as near."""
    typed = typed.lower().replace("-", "_")
    initials = "".join(word[0] for word in name.split("_"))
    if len(typed) > 1 and initials.startswith(typed):
        return 1
    if "_" in typed and f"_{typed}_" in f"_{name}_" and typed != name:
        return 1
    return edit_distance(typed, name)


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        above, row, before_above = row, [i], before
        for j, y in enumerate(b, start=1):
            best = min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, before_above[j - 2] + 1)
            row.append(best)
        before = above
    return row[-1]
