"""Tables of comma-separated values, plain or compressed: a document is the text in one column of a row."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.sources.compressed import open_text, size_of_text
from data_pipeline.sources.document import Document, OnBadRow, file_identity, text_of_row
from data_pipeline.sources.remote_file import Place
from data_pipeline.sources.stretch import WHOLE, Stretch, whole_file

_LONGEST_CELL = 1 << 28  # characters


@dataclass(frozen=True)
class CsvTable:
    """The rows of a `.csv` file, whose first line names the columns; cells are text as they stand."""

    path: Place
    text_field: str

    @property
    def size_bytes(self) -> int | None:
        return size_of_text(self.path)

    def identity(self) -> list[str]:
        return [*file_identity(self.path), "rows of CSV"]  # older versions read it as one text

    def stretches(self, size_bytes: int) -> list[Stretch]:
        return whole_file(self.path)  # a line break may stand inside a cell

    def documents(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[Document]:
        for where, row in self._rows(stretch.size_bytes):
            try:
                if None in row or None in row.values():
                    raise DataError(
                        f"{where} has {'more' if None in row else 'fewer'} cells than the first line names: put cells "
                        'with commas, quotes or line breaks in "quotes"'
                    )
                yield Document(where, [text_of_row(row, self.text_field, where)])
            except DataError as error:
                on_bad_row(error)

    def _rows(self, about_bytes: int) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yields the rows, each with the place where it ends; what `csv` lacks or has in excess is None."""
        csv.field_size_limit(_LONGEST_CELL)
        with open_text(self.path, about_bytes) as stream:
            rows = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
            try:
                if rows.fieldnames is not None and self.text_field not in rows.fieldnames:
                    raise DataError(
                        f"{self.path} has no column {self.text_field!r} (it has "
                        f"{', '.join(map(repr, rows.fieldnames))}): name the column that holds the text with "
                        "--text-field"
                    )
                if (rows.fieldnames or []).count(self.text_field) > 1:
                    raise DataError(
                        f"{self.path} has more than one column {self.text_field!r}: give them names of their own, or "
                        "name another one with --text-field"
                    )
                for row in rows:
                    yield f"{self.path}, line {rows.reader.line_num}", row
            except UnicodeDecodeError as error:
                raise DataError(f"{self.path} is not UTF-8 text: convert it to UTF-8") from error
            except csv.Error as error:
                raise DataError(
                    f"{self.path}, line {rows.reader.line_num} is not CSV ({error}): write the table again"
                ) from error
