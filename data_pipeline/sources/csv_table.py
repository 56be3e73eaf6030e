"""Tables of comma-separated values, plain or compressed: a document is the text in one column of a row."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.document import Document, OnBadRow
from data_pipeline.errors import DataError
from data_pipeline.sources.compressed import open_text, refuse_other_kind, size_of_text
from data_pipeline.sources.remote_file import Place
from data_pipeline.sources.row_text import (
    LONGEST_ROW,
    check_no_twin,
    file_identity,
    lacks_text,
    not_utf8,
    text_of_row,
    too_long,
)
from data_pipeline.sources.stretch import WHOLE, Stretch, whole_file


@dataclass(frozen=True)
class CsvTable:
    """The rows of a `.csv` file, whose first line names the columns; cells are text as they stand."""

    path: Place
    text_field: str
    longest: int = LONGEST_ROW

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
        csv.field_size_limit(max(LONGEST_ROW, self.longest))  # of the process; `_Lines` refuses longer rows first
        with open_text(self.path, about_bytes) as stream:
            refuse_other_kind(stream, self.path)
            lines = _Lines(stream, self)
            rows, began = csv.DictReader(lines, strict=True), 1
            try:
                if rows.fieldnames is not None and self.text_field not in rows.fieldnames:
                    raise lacks_text(f"{self.path} has no column", self.text_field, list(rows.fieldnames))
                check_no_twin(str(self.path), self.text_field, rows.fieldnames or [])
                began = rows.reader.line_num + 1
                for row in rows:
                    yield f"{self.path}, line {rows.reader.line_num}", row
                    lines.row_bytes, began = 0, rows.reader.line_num + 1
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise DataError(
                        f"{self.path}, line {began}: a quote that is opened in this row is never closed: close it"
                    ) from error
                raise DataError(
                    f"{self.path}, line {rows.reader.line_num} is not CSV ({error}): write the table again"
                ) from error


class _Lines:
    """The lines of a table as text. Raises DataError before a row takes more memory than a row may."""

    def __init__(self, stream: io.BufferedReader, table: CsvTable) -> None:
        self._stream, self._table, self._number = stream, table, 0
        self.row_bytes = 0  # of the lines of the row that is read

    def __iter__(self) -> Iterator[str]:
        encoding, longest = "utf-8-sig", self._table.longest
        while line := self._stream.readline(longest + 1):
            self._number += 1
            self.row_bytes += len(line)
            if self.row_bytes > longest:
                raise too_long(f"{self._table.path}, line {self._number}", longest)
            try:
                yield from io.StringIO(line.decode(encoding), newline="")  # a line may end by a carriage return alone
            except UnicodeDecodeError as error:
                raise not_utf8(f"{self._table.path}, line {self._number}", line) from error
            encoding = "utf-8"
