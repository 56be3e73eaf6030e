"""JSON lines, plain or gzip: one object per line with a document's text in one field; blank lines are skipped."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from data_pipeline.errors import DataError
from data_pipeline.sources.text import TextPiece, cut_document, file_identity

_LONGEST_LINE = 1 << 28  # bytes


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
                for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE + 1), b""), start=1):
                    if len(line) > _LONGEST_LINE:  # 10 MB of gzip may hold 10 GB
                        raise DataError(
                            f"{self.path}, line {number} has more than {_LONGEST_LINE:,} bytes: cut the document"
                        )
                    if line.strip():
                        yield from cut_document([self._text(number, line)], f"{self.path}, line {number}")
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
        except (ValueError, RecursionError) as error:  # also a number of too many digits, and what is nested too deeply
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(":")[0]
            raise DataError(f"{where} is not JSON ({why}): put one JSON object on each line") from error
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
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{where} has half of a surrogate pair in field {self.text_field!r}, which is no text: write it anew"
            ) from None
        return text
