"""A `datasets` dataset: `dataset:NAME_OR_PATH[:split]`, the split being "train" unless named.

NAME_OR_PATH is a folder written by `save_to_disk`, a parquet, arrow, csv or json file, a folder of such
files, or a name on the hub. It is streamed in its own order: nothing is mapped, shuffled or copied into a cache. What a
folder or a repository names outside of itself is refused. Rows are read as Arrow's tables: neither a format that was
set when a data set was saved nor the decoding of pictures and sounds has a say. Parquet files here are read by
parquet.py.
"""

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from data_pipeline.document import Document, OnBadRow
from data_pipeline.errors import DataError
from data_pipeline.path_suggestions import did_you_mean
from data_pipeline.sources.arrow_rows import documents_of
from data_pipeline.sources.containment import CARDS, check_card, check_inside, check_saved
from data_pipeline.sources.parquet import ParquetRows
from data_pipeline.sources.row_text import LONGEST_ROW, checked_text, file_identity, lacks_text
from data_pipeline.sources.stretch import WHOLE, Stretch, whole_file
from data_pipeline.storage.paths import user_path

DATASET_PREFIX = "dataset:"
_SPEC = re.compile(r"dataset:(?P<name>[^:]+)(?::(?P<split>.+))?")
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_READERS = {*_BUILDERS.values(), "text", "cache"}
"""The parts of `datasets` that open no file but those in their list, which is checked; "cache" reads the user's own."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_ANSWERS_WITHIN_S = 10.0
_ROWS_PER_READ = 256


class HfDataset:
    """The rows of one split; the text is in one column. `typed` is what the user wrote instead of `spec`."""

    def __init__(self, spec: str, text_field: str, typed: str | None = None, longest: int = LONGEST_ROW) -> None:
        self.spec, self.text_field, self.typed, self.longest = spec, text_field, typed or spec, longest
        match, place = _SPEC.fullmatch(spec), spec.removeprefix(DATASET_PREFIX)
        if place and user_path(place).exists():  # first: it may have a colon in its name
            self.name, split = place, None
        elif match is not None:
            self.name, split = match["name"], match["split"]
        else:
            raise DataError(
                f"source {spec!r} names no data set: write dataset:NAME_OR_PATH or dataset:NAME_OR_PATH:split"
            )
        self.split: str = split or "train"
        self._names_split = split is not None
        self._found, self._has_parquet = list[str](), False  # files of a folder; known when its rows are

    size_bytes: int | None = None  # of the text: not known before reading

    @property
    def path(self) -> Path | None:
        path = user_path(self.name)
        return path if path.exists() else None

    def identity(self) -> list[str]:
        path = self.path
        if path is not None:
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
            return [self.spec, *(part for file in files for part in file_identity(file))]
        info = self._rows.info
        rows = info.splits[self.split].num_examples if info.splits and self.split in info.splits else None
        return [self.spec, str(info.version), str(info.download_size), str(rows)]

    def stretches(self, size_bytes: int) -> list[Stretch]:
        """Cuts the rows of a saved data set, or the files of a data set."""
        from datasets import Dataset

        with self._one_sentence():
            rows = self._rows
            if isinstance(rows, Dataset):
                each = max(1, size_bytes * len(rows) // max(1, rows.data.nbytes))
                return [Stretch(begin, begin + each, size_bytes) for begin in range(0, len(rows), each)] or [WHOLE]
            if self.path is not None and self.path.is_file():
                return whole_file(self.path)
            return [Stretch(number, number + 1, size_bytes) for number in range(self._file_count())] or [WHOLE]

    def documents(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[Document]:
        from datasets import Dataset

        begin, end = stretch.begin, stretch.end
        if isinstance(self._rows, Dataset):
            with self._one_sentence():
                rows = self._rows.select(range(begin, min(end or len(self._rows), len(self._rows))))
            yield from self._documents(rows, begin, "", on_bad_row)
            return
        count = self._file_count()
        for number in range(begin, min(end or count, count)):
            if self._has_parquet:  # whose files may have different columns
                yield from self._parquet_rows(Path(self._found[number])).documents(on_bad_row)
                continue
            with self._one_sentence():
                rows = self._rows.shard(count, number) if count > 1 else self._rows
            name = Path(self._found[number]).name if len(self._found) == count else f"file {number + 1} of {count}"
            of_file = f" of {name}" if count > 1 else ""
            yield from self._documents(rows, 0, of_file, on_bad_row)

    def _documents(self, rows: Any, first: int, of_file: str, on_bad_row: OnBadRow) -> Iterator[Document]:
        """Yields the documents of a data set; a damaged file may be found only here."""
        rows = self._columns(rows)
        with self._one_sentence(of_file):
            tables = rows.with_format("arrow").iter(batch_size=_ROWS_PER_READ)
        while True:
            with self._one_sentence(of_file):
                table = next(tables, None)
            if table is None:
                return
            before = f"{self.typed}, row "
            yield from documents_of(table, first, before, of_file, self.longest, self._document_of, on_bad_row)
            first += table.num_rows

    def _file_count(self) -> int:
        count: int = self._rows.num_shards  # finds the files
        return len(self._found) if self._has_parquet else count

    def _parquet_rows(self, file: Path) -> ParquetRows:
        return ParquetRows(file, self.text_field, self.longest)

    def _document_of(self, row: dict[str, Any], where: str) -> Document:
        return Document(where, [checked_text(row[self.text_field], self.text_field, where)])

    def _columns(self, rows: Any) -> Any:
        """Returns `rows` without their other columns: images and the like are opened wherever they are."""
        from datasets import Value

        features = rows.features
        if features is not None and self.text_field not in features:
            raise lacks_text(f"{self.typed} has no column", self.text_field, list(features))
        if features is not None and not isinstance(features[self.text_field], Value):
            raise DataError(
                f"{self.typed} has {type(features[self.text_field]).__name__} in column {self.text_field!r}: it must "
                "hold strings"
            )
        return rows.select_columns([self.text_field])

    @cached_property
    def _rows(self) -> Any:
        with self._one_sentence():
            return self._load()

    @contextmanager
    def _one_sentence(self, of_file: str = "") -> Iterator[None]:
        """Turns what `datasets` raises into one sentence, and keeps it from logging the same before."""
        from datasets import logging

        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # `datasets` raises dozens of types here, from pyarrow's to the hub client's
            where = f"{self.typed}{of_file.replace(' of ', ', ', 1)}"
            raise DataError(f"{where} cannot be loaded ({_first_sentence(error)}): {self._advice()}") from error
        finally:
            logging.set_verbosity(verbosity)

    def _advice(self) -> str:
        split = " and the split" if self._names_split else ""
        path = user_path(self.name)
        if path.is_file():
            return f"check the file{split}, or fetch or save it again"
        return f"check the {'folder' if path.exists() else 'name or path'}{split}"

    def _load(self) -> Any:
        import datasets

        path = user_path(self.name)
        if (path / "dataset_dict.json").is_file():
            splits = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
            if self.split not in splits:
                raise DataError(
                    f"{self.spec} has no split {self.split!r} (it has {', '.join(map(repr, splits))}): name one of them"
                )
            check_inside(path, [path / self.split])
            check_saved(path, path / self.split)
            return datasets.load_from_disk(str(path / self.split))
        if (path / "state.json").is_file():
            check_saved(path, path)
            return datasets.load_from_disk(str(path))
        if path.is_file():
            builder = _BUILDERS.get(path.suffix)
            if builder is None:
                raise DataError(f"{self.spec} is no data set file (known endings: {', '.join(_BUILDERS)}): convert it")
            alone = glob.escape(str(path))  # `datasets` would read all files that match its name as a pattern
            return datasets.load_dataset(builder, data_files=alone, split=self.split, streaming=True)
        is_local = path.exists()
        if is_local and glob.has_magic(str(path.absolute())):
            raise DataError(
                f"{self.spec}: {path.absolute()} has one of * ? [ in its name, which `datasets` takes for a pattern: "
                "rename the folder, or give its files"
            )
        cards = [path / name for name in CARDS] if is_local else self._hub_cards(str(path))
        for card in filter(Path.exists, cards):  # before `datasets`, which searches at once for what they name
            check_card(card)
        # a name alone could be one of datasets' own builders, which reads what is in the current folder
        rows = datasets.load_dataset_builder(str(path.absolute() if is_local else path))
        if rows.name not in _READERS:
            raise DataError(
                f"{self.spec} is in the format {rows.name!r}, whose reader may open other files too: convert it to one "
                f"of {', '.join(_BUILDERS)}"
            )
        files = rows.config.data_files or {}
        self._check_files(path if is_local else None, files)
        if is_local:
            self._found, self._has_parquet = list(files.get(self.split, ())), rows.name == "parquet"
        return rows.as_streaming_dataset(split=self.split)

    def _check_files(self, folder: Path | None, files: Mapping[str, Sequence[str]]) -> None:
        """Raises DataError unless the files of all splits are in the folder, or, without a folder, on the hub."""
        for name in chain.from_iterable(files.values()):
            if ("://" in name or "::" in name) if folder else not name.startswith("hf://"):
                raise DataError(
                    f"{self.spec} names a file elsewhere, {name!r}: fetch it, if it is meant, and name it as a source"
                )
        if folder:
            check_inside(folder.absolute(), map(Path, chain.from_iterable(files.values())))

    def _hub_cards(self, name: str) -> list[Path]:
        """Downloads the cards of a repository of the hub.

        Raises DataError if the hub cannot be reached: `datasets` would try again for half a minute first.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

        missing = f"{self.spec}: there is no file or folder {Path(name).absolute()}{did_you_mean(Path(name))}"
        if not _HUB_NAME.fullmatch(name):
            raise DataError(f"{missing}: check the path")
        hub = HfApi()
        try:
            info = hub.dataset_info(name, timeout=_HUB_ANSWERS_WITHIN_S)
            cards = [file.rfilename for file in info.siblings or [] if file.rfilename in CARDS]
            return [Path(hub.hf_hub_download(name, card, repo_type="dataset", revision=info.sha)) for card in cards]
        except (RepositoryNotFoundError, OfflineModeIsEnabled):
            return []  # `datasets` says it soon enough, or has a copy
        except (HfHubHTTPError, ValueError):  # it answered, or the name is none
            raise
        except Exception as error:  # the classes of its HTTP client differ from version to version
            raise DataError(
                f"{missing}, and the hub did not answer ({_first_sentence(error)}): check the name and the network, or "
                "set HF_HUB_OFFLINE=1 for a copy in its cache"
            ) from error


def _first_sentence(error: Exception) -> str:
    from datasets.table import CastError

    for one in (error, error.__cause__, error.__context__):
        if isinstance(one, CastError):  # of a file with other columns than the first one: its message has many lines
            there, asked = (
                ", ".join(map(repr, names)) for names in (one.table_column_names, one.requested_column_names)
            )
            return f"it has the columns {there}, and the first file {asked}"
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition(". ")[0].rstrip(".")
