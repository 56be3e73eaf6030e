"""Suggestions for error messages: the option that was probably meant, the nearest numbers that work ("8 or 16")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel

from megalite.config.base import items_of, section_of
from megalite.config.model import ModelConfig

OptionPath = tuple[str, ...]

NAME, NUMBER = "NAME", "N"  # stand for what names an item of a dict or a list of sections
_MOST_NAMES = 10_000  # of a folder that are compared with one
OTHER_SECTION = 1.5
"""Distance in letters of options in different sections: a typo in a section wins over a namesake in another one."""


def dotted(path: OptionPath) -> str:
    """Joins a path: ("training", "steps") becomes "training.steps"."""
    return ".".join(path)


@cache
def option_paths(model: type[BaseModel]) -> tuple[OptionPath, ...]:
    """Lists every section and option of the config, in the order of definition; `data.sources.NAME.path` of items."""

    def walk(section: type[BaseModel], prefix: OptionPath) -> Iterator[OptionPath]:
        for name, field in section.model_fields.items():
            yield (*prefix, name)
            if inner := section_of(field.annotation):
                yield from walk(inner, (*prefix, name))
            elif inner := items_of(field.annotation):
                yield from walk(inner, (*prefix, name, NAME if get_origin(field.annotation) is dict else NUMBER))

    return tuple(walk(model, ()))


@cache
def own_names(model: type[BaseModel]) -> frozenset[str]:
    """Returns the names of all sections and options, each without the section it stands in."""
    return frozenset(path[-1] for path in option_paths(model))


def nearest_option(unknown: OptionPath, value: Any, model: type[BaseModel]) -> tuple[OptionPath, OptionPath] | None:
    """Returns (the typed path, the path that was meant), or None if nothing is similar.

    An unknown section is compared with sections; if none is similar, the first option inside it is looked up:
    `train.learning_rate` gives `optimizer.learning_rate`. In an item, such as a stage, the name may be another
    section's only to the letter.
    """
    paths, typed = named_as(unknown, option_paths(model)), unknown
    if any(path[:-1] == unknown[:-1] for path in paths) and unknown[:-1] not in {(), *option_paths(model)}:
        paths = [path for path in paths if unknown[:-1] == path[:-1] or unknown[-1] == path[-1]]
    sections = [path for path in paths if len(path) == 1 or any(other[:-1] == path for other in paths)]
    while isinstance(value, dict) and value:
        if best := _closest(unknown, sections):
            return unknown, best
        name, value = next(iter(value.items()))
        unknown = (*unknown, str(name))
    return next(((one, best) for one in (unknown, typed) if (best := _closest(one, paths))), None)


def is_slip(typed: OptionPath, model: type[BaseModel]) -> bool:
    """Returns whether one letter parts a name from that of an option of the same section."""
    beside = (path[-1] for path in named_as(typed, option_paths(model)) if path[:-1] == typed[:-1])
    return len(typed[-1]) > 1 and any(_letters_apart(typed[-1], name) == 1 for name in beside)


def nearest_path(path: Path) -> str:
    """Returns words about what was probably meant by a path that does not exist, among the names beside it."""
    with suppress(OSError):
        names = [one.name for one in islice(path.parent.iterdir(), _MOST_NAMES)]
        if found := get_close_matches(path.name, names, n=1, cutoff=0.75):
            return f" (did you mean {path.parent / found[0]}?)"
    return ""


def named_as(typed: OptionPath, paths: Iterable[OptionPath]) -> list[OptionPath]:
    """Returns the paths with the names that were typed for items: `data.sources.web.path` for someone's `web`."""
    named = []
    for path in paths:
        place = next((place for place, part in enumerate(path) if part in (NAME, NUMBER)), None)
        is_alike = place is not None and len(typed) > place and typed[:place] == path[:place]
        named.append((*path[:place], typed[place], *path[place + 1 :]) if place is not None and is_alike else path)
    return named


def nearest_name(typed: str, names: Iterable[str]) -> str | None:
    """Returns the name that was probably meant, or None if none is similar."""
    best = _closest((typed,), [(name,) for name in sorted(names)])
    return best[0] if best else None


def _closest(unknown: OptionPath, candidates: Iterable[OptionPath]) -> OptionPath | None:
    distances = [(distance, path) for path in candidates if (distance := _distance(unknown, path)) is not None]
    return min(distances, key=lambda pair: pair[0])[1] if distances else None


def _distance(typed: OptionPath, option: OptionPath) -> float | None:
    """Returns the distance of two options in letters, or None if they are not similar."""
    typed_name, name = typed[-1].lower().replace("-", "_"), option[-1]
    initials = "".join(word[0] for word in name.split("_"))
    is_initials = len(typed_name) > 1 and initials.startswith(typed_name)  # `lr` for `learning_rate`
    is_part = "_" in typed_name and f"_{typed_name}_" in f"_{name}_" and typed_name != name  # `batch_size`
    is_word = len(typed_name) > 2 and typed_name in name.split("_") and typed_name != name  # `type` for `rope_type`
    letters = 1.0 if is_initials or is_part else 1.25 if is_word else _letters_apart(typed_name, name)
    if letters > max(1, len(name) // 3):
        return None
    return letters + min(OTHER_SECTION, _letters_apart(dotted(typed[:-1]), dotted(option[:-1])))


def _letters_apart(a: str, b: str) -> int:
    """Returns the number of letters of the longer word that difflib finds no counterpart for."""
    matched = sum(block.size for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks())
    return max(len(a), len(b)) - matched


def either(values: Iterable[int]) -> str:
    """Formats alternatives: [2, 4] becomes "2 or 4"; zero is left out."""
    return " or ".join(str(value) for value in values if value > 0)


def multiples_near(value: int, of: int) -> str:
    """Returns the multiples of `of` below and above `value`."""
    return either([value // of * of, (value // of + 1) * of])


def neighbours(value: int, allowed: Iterable[int]) -> str:
    """Returns the nearest allowed numbers below and above `value`, from an ascending list."""
    numbers = list(allowed)
    below = [number for number in numbers if number < value]
    above = [number for number in numbers if number > value]
    return either(below[-1:] + above[:1])


def tensor_parallel_fits(model: ModelConfig, size: int) -> bool:
    """Returns whether `size` ranks can share the heads; if there are fewer kv heads than ranks, they are replicated."""
    kv = model.num_key_value_heads
    if model.num_attention_heads % size or (kv % size and size % kv):
        return False
    return size <= kv or kv * model.head_dim % size == 0


def tensor_parallel_near(model: ModelConfig, size: int) -> str:
    """Returns the nearest tensor_parallel_sizes that the model's heads allow."""
    largest = min(model.num_attention_heads, model.vocab_size)
    return neighbours(size, (n for n in range(1, largest + 1) if tensor_parallel_fits(model, n)))
