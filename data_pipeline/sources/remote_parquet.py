"""A parquet file at a URL: a document is the text in one column of a row.

Of each group of rows only that column is fetched, a batch of rows at a time. Local parquet files are read by `datasets`
(hf_dataset.py), which for a URL would repeat requests in silence, and keep what it fetches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.sources.document import Document, OnBadRow, checked_text
from data_pipeline.sources.remote_file import RemoteFile
from data_pipeline.sources.stretch import WHOLE, Stretch, whole_file

_ROWS_PER_READ = 1000
_BUFFER_BYTES = 1 << 20  # of a column, in place of a whole group of rows


@dataclass(frozen=True)
class RemoteParquet:
    """The rows of a parquet file at a URL."""

    path: RemoteFile
    text_field: str

    size_bytes: None = None  # of the text: not known before reading

    def identity(self) -> list[str]:
        return self.path.identity()

    def stretches(self, size_bytes: int) -> list[Stretch]:
        return whole_file(self.path)  # to know its row groups would take a request for each file

    def documents(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[Document]:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        number = 0
        try:
            with (
                self.path.open(stretch.size_bytes) as stream,
                ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table,
            ):
                columns = self.columns(table.schema_arrow.names)
                for batch in table.iter_batches(_ROWS_PER_READ, columns=columns):
                    for row in batch.to_pylist():
                        where = f"{self.path}, row {number}"
                        number += 1
                        try:
                            yield self.document_of(row, where)
                        except DataError as error:
                            on_bad_row(error)
        except pyarrow.ArrowException as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{self.path} is not a whole parquet file ({reason}): write it again") from error

    def columns(self, names: Sequence[str]) -> list[str]:
        """Returns the columns to read. Raises DataError if the one with the text is not among `names`."""
        if self.text_field not in names:
            raise DataError(
                f"{self.path} has no column {self.text_field!r} (it has {', '.join(map(repr, names))}): name the "
                "column that holds the text with --text-field"
            )
        return [self.text_field]

    def document_of(self, row: dict[str, Any], where: str) -> Document:
        """Returns the document in a row. Raises DataError if there is none."""
        return Document(where, [checked_text(row[self.text_field], self.text_field, where)])
