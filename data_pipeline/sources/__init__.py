"""Sources of text. A source yields its documents as a stream of pieces, so that a large file is never in memory whole.

    "notes.txt", "corpus/", "**/*.md"       text: one file is one document           (text.py)
    "dump.jsonl", "dump.jsonl.gz"           JSON lines: one line is one document     (jsonl.py)
    "dataset:NAME_OR_PATH[:split]"          a `datasets` dataset, local or from the hub (hf_dataset.py)
    "rows.parquet"                          the same as dataset:rows.parquet
    "python-stdlib"                         the sources of Python's standard library, which every machine has

To add one: a file here with a class that satisfies `Source`, and a line in `open_sources` or `_open_file`.
"""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from data_pipeline.errors import DataError
from data_pipeline.files import is_url
from data_pipeline.sources.containment import check_inside
from data_pipeline.sources.hf_dataset import DATASET_PREFIX, HfDataset
from data_pipeline.sources.jsonl import JsonLinesSource
from data_pipeline.sources.text import TextFile, TextPiece
from data_pipeline.tokenizer import python_stdlib_sources

PYTHON_STDLIB = "python-stdlib"


class Source(Protocol):
    """A text file, a file of JSON lines or a data set."""

    @property
    def size_bytes(self) -> int | None:
        """Size of the input, or None if it is not known before reading."""

    def identity(self) -> list[str]:
        """Returns strings that change when the content may have changed."""

    def pieces(self) -> Iterator[TextPiece]:
        """Yields the documents in a fixed order, each cut into one or more pieces; empty documents are left out."""


def open_sources(specs: Sequence[str], text_field: str) -> list[Source]:
    """Opens one source per file or data set in `specs`, in the order given; files of a folder or glob are sorted."""
    if not specs:
        raise DataError("no source is given: name at least one text file, folder, glob, .jsonl file or dataset:NAME")
    sources: list[Source] = []
    for spec in specs:
        if spec.startswith(DATASET_PREFIX):
            sources.append(HfDataset(spec, text_field))
        elif spec == PYTHON_STDLIB:
            sources.extend(map(TextFile, python_stdlib_sources()))
        else:
            sources.extend(_open_file(path, text_field) for path in _expand(spec))
    return sources


def _open_file(path: Path, text_field: str) -> Source:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return JsonLinesSource(path, text_field)
    if path.suffix == ".parquet":
        return HfDataset(f"{DATASET_PREFIX}{path}", text_field, typed=str(path))
    return TextFile(path)


def _expand(spec: str) -> list[Path]:
    path = Path(spec).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not files:
            raise DataError(f"source folder {spec} holds no files: give a folder with text or .jsonl files")
        check_inside(path, files)
        return sorted(files)
    if is_url(spec):  # before the pattern: it may have a question mark
        raise DataError(f"source {spec} is a URL, which is not read: download it and give the file")
    if spec == "-":
        raise DataError("source - (stdin) is not read: write the text into a file and give that")
    if glob.has_magic(spec):
        files = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
        if not files:
            raise DataError(f"no file matches the source pattern {spec!r}: check it, and quote it for the shell")
        return sorted(files)
    raise DataError(f"source {spec} does not exist: give a file, a folder, a glob, or dataset:NAME for a data set")
