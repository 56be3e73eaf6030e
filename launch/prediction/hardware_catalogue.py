"""The hardware catalogue: that of the package, extended by a file of the user.

`$XDG_CONFIG_HOME/megalite/hardware.yaml` has the format of megalite/planner/catalogue.yaml; for known names it states
only the fields that differ. `megalite plan calibrate` writes efficiencies into it. No torch here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launch.errors import LaunchError
from megalite.checkpoint.durable_files import write_durably
from megalite.config import ConfigError
from megalite.config.errors import problems_of, shown
from megalite.config.suggestions import dotted, nearest_name
from megalite.config.user_folders import settings_folder
from megalite.config.yaml_text import to_yaml
from megalite.planner.hardware import Accelerator, Catalogue, Link, catalogue, extended, read_yaml

KINDS: dict[str, type[Accelerator] | type[Link]] = {"accelerators": Accelerator, "links": Link}
EXAMPLES = {"accelerators": "efficiency: 0.6", "links": "gb_per_s: 50"}


def user_file() -> Path:
    """Path of the user's catalogue, which need not exist."""
    return settings_folder() / "hardware.yaml"


def known_hardware(path: Path | None = None) -> Catalogue:
    """The package's catalogue extended by the user's. Raises ConfigError, which names file and line."""
    path = path or user_file()
    values, lines = _read(path)
    try:
        return extended(catalogue(), values)
    except ValidationError:
        place, sentence = _problem_of(values)
    line = next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)
    raise ConfigError(f"{path}{f', line {line}' if line else ''}: {sentence}")


def _problem_of(values: Any) -> tuple[tuple[str, ...], str]:
    """The path and the description of the first error in a user's catalogue."""
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
    """Merges `entries`, by section and name, into the user's catalogue and returns its path.

    Keeps the comments at its top. Concurrent writers wait for one another. Raises ConfigError where the existing file
    cannot be read, and LaunchError where it cannot be written.
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
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            comments = "".join(takewhile(lambda line: line.startswith("#"), lines))
            write_durably(path, (comments + to_yaml(values)).encode())
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}; name another file with --output") from None
    return path


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Locks the folder of the catalogue: it is not replaced as the file is, and needs no lock file."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    try:
        return read_yaml(path)
    except (FileNotFoundError, NotADirectoryError):
        return None, {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
