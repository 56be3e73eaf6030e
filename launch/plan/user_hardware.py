"""The catalogue of hardware as this user has it: what the package knows, and a file of one's own beside it.

`$XDG_CONFIG_HOME/megalite/hardware.yaml` has the form of megalite/planner/catalogue.yaml; for names that are known
already it says only what differs. `megalite plan calibrate` writes efficiencies into it. No torch here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launch.errors import LaunchError
from megalite.checkpoint.files import write_durably
from megalite.config import ConfigError
from megalite.config.errors import problems_of, shown
from megalite.config.nearest import dotted, nearest_name
from megalite.config.text import parse_yaml, to_yaml
from megalite.planner.hardware import Accelerator, Catalogue, Link, catalogue, extended

KINDS: dict[str, type[Accelerator] | type[Link]] = {"accelerators": Accelerator, "links": Link}
EXAMPLES = {"accelerators": "efficiency: 0.6", "links": "gb_per_s: 50"}


def user_file() -> Path:
    """Where the user's own catalogue is, or would be."""
    return _xdg("XDG_CONFIG_HOME", ".config") / "hardware.yaml"


def cache_folder() -> Path:
    """Where what was measured is kept."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def known_hardware(path: Path | None = None) -> Catalogue:
    """The package's catalogue with the user's. Raises ConfigError, one sentence with file and line."""
    path = path or user_file()
    values, lines = _read(path)
    try:
        return extended(catalogue(), values)
    except ValidationError:
        place, sentence = _problem_of(values)
    line = next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)
    raise ConfigError(f"{path}{f', line {line}' if line else ''}: {sentence}")


def _problem_of(values: Any) -> tuple[tuple[str, ...], str]:
    """Where the first thing stands that is wrong in a user's catalogue, and what it is."""
    if not isinstance(values, dict):
        return (), f"the file must have {' and '.join(KINDS)}, got {shown(values)}"
    for section, entries in values.items():
        if section not in KINDS:
            near = nearest_name(str(section), KINDS)
            meant = f'did you mean "{near}"?' if near else f"the file has {' and '.join(KINDS)}"
            return (section,), f'unknown section "{section}": {meant}'
        if not isinstance(entries, dict):
            return (section,), f"{section} must have entries with a name each, got {shown(entries)}"
        for name, entry in entries.items():
            if (problem := _problem_of_entry(section, name, entry)) is not None:
                return problem
    return (), "the file is no catalogue of accelerators and links"


def _problem_of_entry(section: str, name: str, entry: Any) -> tuple[tuple[str, ...], str] | None:
    where = f"{section}.{name}"
    if not isinstance(entry, dict):
        return (section, name), f"{where} must have fields such as {EXAMPLES[section]}, got {shown(entry)}"
    known = getattr(catalogue(), section)
    old = next((each for key, each in known.items() if key.lower() == name.lower()), None)
    try:
        KINDS[section].model_validate(({} if old is None else old.model_dump(exclude_unset=True)) | entry)
    except ValidationError as error:
        problem = problems_of(error, KINDS[section])[0]
        sentence = problem.sentence.replace(": the config has ", f": {section} have ")
        return (section, name, *problem.path), f"{dotted((section, name, *problem.path))}: {sentence}"
    return None


def add_to_user_file(entries: dict[str, dict[str, Any]], path: Path | None = None) -> Path:
    """Merges `entries`, by section and name, into the user's catalogue; the comments at its head stay. Returns where.

    Of two that add at a time, the second waits for the first. Raises ConfigError where what is there cannot be read,
    LaunchError where it cannot be written.
    """
    path = path or user_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_writer(path):
            values, _ = _read(path)
            values = dict(values or {})
            for section, added in entries.items():
                old = dict(values.get(section) or {})
                values[section] = old | {name: (old.get(name) or {}) | entry for name, entry in added.items()}
            write_durably(path, (_head(path) + to_yaml(values)).encode())
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}; name another file with --output") from None
    return path


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Holds the folder, which stays where it is while files in it are replaced, and needs no file of its own."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None, {}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _head(path: Path) -> str:
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join(lines[:first])


def _xdg(variable: str, below_home: str) -> Path:
    named = os.environ.get(variable, "")
    # the specification says that relative ones are to be ignored
    root = Path(named) if Path(named).is_absolute() else _home() / below_home
    return root / "megalite"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user whom nobody knows, as in a container
        return Path("/nonexistent")
