"""A `datasets` dataset: `dataset:NAME_OR_PATH[:split]`, the split being "train" unless named.

NAME_OR_PATH is a folder written by `save_to_disk`, a parquet, arrow, csv or json file, a folder of such
files, or a name on the hub. It is streamed in its own order: nothing is mapped, shuffled or copied into a cache. What a
folder or a repository names outside of itself is refused.
"""

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.errors import DataError
from data_pipeline.sources.containment import CARDS, check_card, check_inside, check_saved
from data_pipeline.sources.document import Document, OnBadRow, checked_text, file_identity
from data_pipeline.sources.stretch import WHOLE, Stretch, whole_file

DATASET_PREFIX = "dataset:"
_SPEC = re.compile(r"dataset:(?P<name>[^:]+)(?::(?P<split>.+))?")
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_READERS = {*_BUILDERS.values(), "text", "cache"}
"""The parts of `datasets` that open no file but those in their list, which is checked; "cache" reads the user's own."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_ANSWERS_WITHIN_S = 10.0
_ROWS_PER_READ = 1000


class _RowGroup(NamedTuple):
    rows: int
    size_bytes: int  # of all columns, not compressed


class HfDataset:
    """The rows of one split; the text is in one column. `typed` is what the user wrote instead of `spec`."""

    def __init__(self, spec: str, text_field: str, typed: str | None = None) -> None:
        self.spec, self.text_field, self.typed = spec, text_field, typed or spec
        match, place = _SPEC.fullmatch(spec), spec.removeprefix(DATASET_PREFIX)
        if place and Path(place).expanduser().exists():  # first: it may have a colon in its name
            self.name, split = place, None
        elif match is not None:
            self.name, split = match["name"], match["split"]
        else:
            raise DataError(
                f"source {spec!r} names no data set: write dataset:NAME_OR_PATH or dataset:NAME_OR_PATH:split"
            )
        self.split: str = split or "train"
        self._names_split = split is not None

    size_bytes: int | None = None  # of the text: not known before reading

    @property
    def path(self) -> Path | None:
        path = Path(self.name).expanduser()
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
        """Cuts the rows of a saved data set, the row groups of a Parquet file, or the files of a data set."""
        from datasets import Dataset

        with self._one_sentence():
            rows = self._rows
            if isinstance(rows, Dataset):
                each = max(1, size_bytes * len(rows) // max(1, rows.data.nbytes))
                return [Stretch(begin, begin + each, size_bytes) for begin in range(0, len(rows), each)] or [WHOLE]
            if (groups := self._row_groups) is not None:
                return [Stretch(number, number + 1, group.size_bytes) for number, group in enumerate(groups)]
            if self.path is not None and self.path.is_file():
                return whole_file(self.path)
            return [Stretch(number, number + 1, size_bytes) for number in range(rows.num_shards)] or [WHOLE]

    def documents(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[Document]:
        rows, number, of_file = self._rows_of(stretch)
        for batch in self._batches(self._columns(rows)):
            for values in zip(*batch.values(), strict=True):
                where = f"{self.typed}, row {number}{of_file}"
                number += 1
                try:
                    yield self._document_of(dict(zip(batch, values, strict=True)), where)
                except DataError as error:
                    on_bad_row(error)

    def _rows_of(self, stretch: Stretch) -> tuple[Any, int, str]:
        """Returns the rows of a stretch, the number of the first one, and, for sentences, the file that counts them."""
        from datasets import Dataset

        with self._one_sentence():
            rows = self._rows
            if stretch.end is None:
                return rows, 0, ""
            if isinstance(rows, Dataset):
                return rows.select(range(stretch.begin, min(stretch.end, len(rows)))), stretch.begin, ""
            if (groups := self._row_groups) is not None:
                rows = rows.reshard()
                return rows.shard(len(groups), stretch.begin), sum(group.rows for group in groups[: stretch.begin]), ""
            count = rows.num_shards
            of_file = f" of file {stretch.begin + 1} of {count}" if count > 1 else ""
            return rows.shard(count, stretch.begin), 0, of_file

    @cached_property
    def _row_groups(self) -> list["_RowGroup"] | None:
        """The row groups of a Parquet file, if `datasets` can read them one by one; None for anything else."""
        path = Path(self.name).expanduser()
        if path.suffix != ".parquet" or not path.is_file() or not hasattr(self._rows, "reshard"):  # older `datasets`
            return None
        from pyarrow.parquet import read_metadata

        metadata = read_metadata(path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        if not groups or self._rows.reshard().num_shards != len(groups):
            return None
        return [_RowGroup(group.num_rows, group.total_byte_size) for group in groups]

    def _document_of(self, row: dict[str, Any], where: str) -> Document:
        return Document(where, [checked_text(row[self.text_field], self.text_field, where)])

    def _columns(self, rows: Any) -> Any:
        """Returns `rows` without their other columns: images and the like are opened wherever they are."""
        from datasets import Value

        features = rows.features
        if features is not None and self.text_field not in features:
            raise DataError(
                f"{self.typed} has no column {self.text_field!r} (it has {', '.join(map(repr, features))}): "
                "name the column that holds the text with --text-field"
            )
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

    def _batches(self, rows: Any) -> Iterator[Any]:
        """Yields the rows in batches: a damaged file may be found only here."""
        with self._one_sentence():
            yield from rows.iter(batch_size=_ROWS_PER_READ)

    @contextmanager
    def _one_sentence(self) -> Iterator[None]:
        """Turns what `datasets` raises into one sentence, and keeps it from logging the same before."""
        from datasets import logging

        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # `datasets` raises dozens of types here, from pyarrow's to the hub client's
            raise DataError(f"{self.typed} cannot be loaded ({_first_sentence(error)}): {self._advice()}") from error
        finally:
            logging.set_verbosity(verbosity)

    def _advice(self) -> str:
        split = " and the split" if self._names_split else ""
        path = Path(self.name).expanduser()
        if path.is_file():
            return f"check the file{split}, or fetch or save it again"
        return f"check the {'folder' if path.exists() else 'name or path'}{split}"

    def _load(self) -> Any:
        import datasets

        path = Path(self.name).expanduser()
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
        self._check_files(path if is_local else None, rows.config.data_files or {})
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

        if not _HUB_NAME.fullmatch(name):
            raise DataError(f"{self.spec}: there is no file or folder {Path(name).absolute()}: check the path")
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
                f"{self.spec}: there is no file or folder {Path(name).absolute()}, and the hub did not answer "
                f"({_first_sentence(error)}): check the name and the network, or set HF_HUB_OFFLINE=1 for a copy in "
                "its cache"
            ) from error


def _first_sentence(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition(". ")[0].rstrip(".")
