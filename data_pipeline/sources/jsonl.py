"""JSON lines, plain or gzip: one object per line with a document's text in one field; blank lines are skipped."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from data_pipeline.errors import DataError
from data_pipeline.sources.text import TextPiece, cut_document, file_identity


@dataclass(frozen=True)
class JsonLinesSource:
    """A `.jsonl` or `.jsonl.gz` file: every line is a document."""

    path: Path
    text_field: str

    @property
    def size_bytes(self) -> int | None:
        return None if self.path.suffix == ".gz" else self.path.stat().st_size

    def identity(self) -> list[str]:
        return file_identity(self.path)

    def pieces(self) -> Iterator[TextPiece]:
        with self._open() as stream:
            try:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield from cut_document([self._text(number, line)])
            except (gzip.BadGzipFile, EOFError) as error:
                raise DataError(
                    f"{self.path} is not a complete gzip file ({error}): fetch or compress it again"
                ) from error

    def _open(self) -> BinaryIO:
        if self.path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(self.path, "rb"))
        return self.path.open("rb")

    def _text(self, number: int, line: bytes) -> str:
        where = f"{self.path}, line {number}"
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 text: convert the file to UTF-8") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON ({error.msg}): put one JSON object on each line") from error
        if not isinstance(row, dict):
            raise DataError(f'{where} is not a JSON object: write {{"{self.text_field}": "..."}} on each line')
        if self.text_field not in row:
            raise DataError(
                f"{where} has no field {self.text_field!r} (it has {', '.join(map(repr, row)) or 'none'}): "
                "name the field that holds the text with --text-field"
            )
        text = row[self.text_field]
        if not isinstance(text, str):
            raise DataError(f"{where} has {type(text).__name__} in field {self.text_field!r}: it must hold a string")
        return text
