"""Sources of text. A source yields its documents as blocks of text, so that a large file is never in memory whole.

    "notes.txt", "corpus/", "**/*.md.zst"   text: one file is one document           (text.py)
    "dump.jsonl", "dump.json.gz"            JSON: one object is one document         (json_rows.py)
    "table.csv"                             a table: one row is one document         (csv_table.py)
    "dataset:NAME_OR_PATH[:split]"          a `datasets` dataset, local or from the hub (hf_dataset.py)
    "rows.parquet"                          a table: one row is one document         (parquet.py)
    "rows.arrow"                            the same as dataset:rows.arrow
    "python-stdlib"                         the sources of Python's standard library, which every machine has
    "s3://b/x.parquet", "https://h/x.jsonl" the same formats at a URL, a folder or a pattern there (remote_file.py)

Files of text, JSON and tables may be compressed (compressed.py). To add a source: a file here with a class that
satisfies `Source`, and a line in `open_sources` or `_open_file`.
"""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from data_pipeline.document import Document, OnBadRow
from data_pipeline.errors import DataError
from data_pipeline.path_suggestions import did_you_mean
from data_pipeline.sources.chats import ChatDataset, ChatParquet, ChatRows
from data_pipeline.sources.compressed import name_inside
from data_pipeline.sources.csv_table import CsvTable
from data_pipeline.sources.folders import files_in
from data_pipeline.sources.hf_dataset import DATASET_PREFIX, HfDataset
from data_pipeline.sources.json_rows import JsonRows
from data_pipeline.sources.parquet import ParquetRows
from data_pipeline.sources.python_stdlib import python_stdlib_sources
from data_pipeline.sources.remote_file import Place, RemoteFile, remote_files
from data_pipeline.sources.row_text import LONGEST_ROW
from data_pipeline.sources.stretch import WHOLE, Stretch
from data_pipeline.sources.text import TextFile
from data_pipeline.storage.file_io import refuse_lfs_pointer
from data_pipeline.storage.paths import is_url, user_path

PYTHON_STDLIB = "python-stdlib"
_NO_TEXT = {
    (".lzma", ".br", ".Z"): "is compressed in a way that is not read: compress it anew, as .zst or .gz",
    (".gpg", ".pgp", ".age", ".enc"): "is encrypted: decrypt it and give the result",
    (".zip", ".7z", ".tar", ".tgz"): "is an archive, which is not read: unpack it and give its files",
    (".parquet", ".arrow"): "is compressed a second time, around its own compression: unpack it and give the result",
    (".npy", ".npz", ".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".h5", ".hdf5"): (
        "holds arrays or objects, no text: write the text into a .jsonl or .parquet file"
    ),
    (".tsv", ".xls", ".xlsx", ".ods", ".feather", ".orc", ".avro"): (
        "is a table in a format that is not read: save it as .csv, .jsonl or .parquet"
    ),
}
"""Endings of files that would be nonsense, or an error at their first byte, if they were read as text."""


class Source(Protocol):
    """A text file, a file of rows or a data set."""

    @property
    def path(self) -> Place | None:
        """File or folder that is read; None for a data set on the hub."""

    @property
    def size_bytes(self) -> int | None:
        """Size of the input, or None if it is not known before reading."""

    def identity(self) -> list[str]:
        """Returns strings that change when the content may have changed."""

    def stretches(self, size_bytes: int) -> list[Stretch]:
        """Cuts the source into stretches of about `size_bytes` where that is possible without reading its text."""

    def documents(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[Document]:
        """Yields the documents of a stretch in a fixed order, empty ones too.

        `on_bad_row` decides about a row that holds none.
        """


def open_sources(specs: Sequence[str], text_field: str | None, longest: int = LONGEST_ROW) -> list[Source]:
    """Opens one source per file or data set in `specs`, in the order given; files of a folder or glob are sorted.

    Their documents are the texts in `text_field`; where that is None, they are conversations. A row of more than
    `longest` bytes is a bad one.
    """
    if not specs:
        raise DataError("no source is given: name at least one text file, folder, glob, .jsonl file or dataset:NAME")
    sources: list[Source] = []
    for spec in specs:
        file = user_path(spec.removeprefix(DATASET_PREFIX))
        if spec.startswith(DATASET_PREFIX) and not (file.suffix == ".parquet" and file.is_file()):
            sources.append(
                ChatDataset(spec, longest=longest)
                if text_field is None
                else HfDataset(spec, text_field, longest=longest)
            )
        elif spec.startswith(DATASET_PREFIX):
            sources.append(_open_file(file, text_field, longest))
        elif spec == PYTHON_STDLIB and text_field is not None:
            sources.extend(map(TextFile, python_stdlib_sources()))
        else:
            sources.extend(_open_file(path, text_field, longest) for path in _expand(spec))
    return sources


def _open_file(path: Place, text_field: str | None, longest: int) -> Source:
    if isinstance(path, Path):
        refuse_lfs_pointer(path)
    if path.suffix == ".parquet":
        return ChatParquet(path, longest=longest) if text_field is None else ParquetRows(path, text_field, longest)
    if isinstance(path, RemoteFile) and path.suffix == ".arrow":
        raise DataError(f"{path} is an arrow file, which is read from this machine alone: download it")
    if path.suffix == ".arrow":
        spec, typed = f"{DATASET_PREFIX}{path}", str(path)
        return ChatDataset(spec, typed, longest) if text_field is None else HfDataset(spec, text_field, typed, longest)
    name = name_inside(path)
    for endings, reason in _NO_TEXT.items():
        if name.endswith(endings):
            raise DataError(f"{path} {reason}")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        may_be_array = name.endswith(".json")
        if text_field is None:
            return ChatRows(path, may_be_array=may_be_array, longest=longest)
        return JsonRows(path, text_field, may_be_array, longest)
    if text_field is None:
        raise DataError(f"{path} holds no rows of conversations: give .jsonl, .json or .parquet files, or dataset:NAME")
    if name.endswith(".csv"):
        return CsvTable(path, text_field, longest)
    return TextFile(path)


def _expand(spec: str) -> Sequence[Place]:
    if is_url(spec) and not spec.startswith("file://"):
        return remote_files(spec)
    path = user_path(spec.removeprefix("file://"))
    if path.is_file():
        return [path]
    if path.is_dir():
        files = files_in(path)
        if not files:
            raise DataError(f"source folder {spec} holds no files: give a folder with text or .jsonl files")
        return files
    if spec == "-":
        raise DataError("source - (stdin) is not read: write the text into a file and give that")
    if glob.has_magic(spec):
        files = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
        if not files:
            raise DataError(f"no file matches the source pattern {spec!r}: check it, and quote it for the shell")
        return sorted(files)
    if path.exists():
        raise DataError(f"source {spec} is a pipe or device, no file: write its text into one and give that")
    raise DataError(
        f"source {spec} does not exist{did_you_mean(path, also=[PYTHON_STDLIB])}: give a file, a folder, a glob, a "
        "URL, or dataset:NAME for a data set"
    )
