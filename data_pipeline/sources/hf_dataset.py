"""A `datasets` dataset: `dataset:NAME_OR_PATH[:split]`, the split being "train" unless named.

NAME_OR_PATH is a folder written by `save_to_disk`, a parquet, arrow, csv or json file, a folder of such
files, or a name on the hub. It is streamed in its own order: nothing is mapped, shuffled or copied into a cache.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.sources.text import TextPiece, cut_document, file_identity

DATASET_PREFIX = "dataset:"
_SPEC = re.compile(r"dataset:(?P<name>[^:]+)(?::(?P<split>.+))?")
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_ROWS_PER_READ = 1000


class HfDataset:
    """The rows of one split; the text is in one column."""

    def __init__(self, spec: str, text_field: str) -> None:
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise DataError(
                f"source {spec!r} names no data set: write dataset:NAME_OR_PATH or dataset:NAME_OR_PATH:split"
            )
        self.spec, self.text_field = spec, text_field
        self.name: str = match["name"]
        self.split: str = match["split"] or "train"

    size_bytes: int | None = None  # of the text: not known before reading

    def identity(self) -> list[str]:
        path = Path(self.name).expanduser()
        if path.exists():
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
            return [self.spec, *(part for file in files for part in file_identity(file))]
        info = self._rows.info
        rows = info.splits[self.split].num_examples if info.splits and self.split in info.splits else None
        return [self.spec, str(info.version), str(info.download_size), str(rows)]

    def pieces(self) -> Iterator[TextPiece]:
        rows = self._rows
        if rows.column_names is not None and self.text_field not in rows.column_names:
            raise DataError(
                f"{self.spec} has no column {self.text_field!r} (it has {', '.join(map(repr, rows.column_names))}): "
                "name the column that holds the text with --text-field"
            )
        number = 0
        for batch in rows.iter(batch_size=_ROWS_PER_READ):
            for text in batch[self.text_field]:
                if not isinstance(text, str):
                    raise DataError(
                        f"{self.spec}, row {number} has {type(text).__name__} in column {self.text_field!r}: it must "
                        "hold a string"
                    )
                yield from cut_document([text])
                number += 1

    @cached_property
    def _rows(self) -> Any:
        try:
            return self._load()
        except DataError:
            raise
        except Exception as error:  # `datasets` raises dozens of types here, from pyarrow's to the hub client's
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(
                f"{self.spec} cannot be loaded ({reason}): check the name, the split and the path"
            ) from error

    def _load(self) -> Any:
        import datasets

        path = Path(self.name).expanduser()
        if (path / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(path))
            if self.split not in splits:
                raise DataError(
                    f"{self.spec} has no split {self.split!r} (it has {', '.join(map(repr, splits))}): name one of them"
                )
            return splits[self.split]
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        if path.is_file():
            builder = _BUILDERS.get(path.suffix)
            if builder is None:
                raise DataError(f"{self.spec} is no data set file (known endings: {', '.join(_BUILDERS)}): convert it")
            return datasets.load_dataset(builder, data_files=str(path), split=self.split, streaming=True)
        return datasets.load_dataset(str(path), split=self.split, streaming=True)
