"""Keeps the files of a data folder inside it: somebody else may have made the folder, and what it names is trained on.

Links, the metadata of a README.md and the list of files of a saved data set may name any file of this machine, any URL,
or a pattern that takes hours to search.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from data_pipeline.errors import DataError
from data_pipeline.storage.paths import is_url

CARDS = ("README.md", ".huggingface.yaml")
_CARD_BYTES = 1 << 24
_MOST_CHARACTERS = 1_000_000  # of the metadata: room for thousands of configurations, read in seconds
_MOST_VALUES = 100_000  # of the metadata, each alias counted as what it stands for
_HUB_CACHE = re.compile(r"(?:datasets|models|spaces)--.+")  # the hub's name of a repository's folder in its cache


def check_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raises DataError if one of `files`, found in `folder` or named by it, is elsewhere.

    Links of a snapshot in the hub's cache may lead to the other files of their repository there.
    """
    root = _root(folder)
    real_parents: dict[Path, Path] = {}
    for file in files:
        parent = real_parents.setdefault(file.parent, file.parent.resolve())
        real = file.resolve() if file.is_symlink() or file.name == ".." else parent / file.name
        if not real.is_relative_to(root):
            raise DataError(
                f"{file} leads outside its folder, to {real}: copy it into {folder}, or, if it is meant, name it as "
                "a source itself or by a pattern"
            )


def _root(folder: Path) -> Path:
    real = folder.resolve()
    snapshots = (parent.parent for parent in real.parents if parent.name == "snapshots")
    return next((repository for repository in snapshots if _HUB_CACHE.fullmatch(repository.name)), real)


def check_saved(folder: Path, saved: Path) -> None:
    """Raises DataError if the data set that `save_to_disk` wrote to `saved`, in `folder`, has files elsewhere."""
    names = [entry["filename"] for entry in json.loads((saved / "state.json").read_bytes())["_data_files"]]
    if not names:
        raise DataError(f"{saved / 'state.json'} names no files in _data_files: save the data set again")
    check_inside(folder, [saved / "state.json", *(saved / name for name in names)])


def check_card(path: Path) -> None:
    """Raises DataError if the metadata in `path`, in which `datasets` looks for data files, leads out of its folder."""
    for configuration in _configurations(path):
        for place in _strings([configuration.get("data_files"), configuration.get("data_dir")]):
            parts = PurePosixPath(place).parts
            if place.startswith(("/", "~")) or ".." in parts or is_url(place) or "::" in place:
                raise DataError(
                    f"{path} names data files outside its folder, {place!r}: fetch them, if they are meant, and name "
                    "them as sources themselves"
                )


def _configurations(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of `configs` in a card's metadata that are mappings, read as `datasets` reads them."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if not path.is_file():  # `datasets` would wait for a pipe
        raise DataError(f"{path} is no file: move it away")
    if path.stat().st_size > _CARD_BYTES:
        raise DataError(f"{path} has more than {_CARD_BYTES:,} bytes: move it away, or shorten it")
    with path.open(encoding="utf-8-sig", newline="") as stream:
        text = stream.read()
    if path.suffix == ".md":
        block = REGEX_YAML_BLOCK.search(text)
        text = block[2] if block else ""
    if len(text) > _MOST_CHARACTERS:
        raise DataError(f"{path} has more than {_MOST_CHARACTERS:,} characters of metadata: shorten it")
    metadata = _CardLoader(path, text).get_single_data()
    configurations = metadata.get("configs") if isinstance(metadata, dict) else None
    return [one for one in configurations or [] if isinstance(one, dict)]


class _CardLoader(yaml.SafeLoader):
    """Counts values while it reads; one that contains itself, which has no end, counts as too many."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(text)
        self._path, self._values = path, 0
        self._sizes: dict[int, int] = {}  # of nodes by id

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        before, is_alias = self._values, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._values += self._sizes.get(id(node), _MOST_VALUES) if is_alias else 1
        self._sizes[id(node)] = self._values - before
        if self._values > _MOST_VALUES:
            raise DataError(
                f"{self._path} has more than {_MOST_VALUES:,} values, with those its aliases repeat: shorten it"
            )
        return node


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
