"""Parquet files, here or at a URL: a document is the text in one column of a row.

Only that column is read, a few rows at a time: fewer where a text that a file holds once for thousands of rows is long,
as a file of a kilobyte may otherwise become gigabytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_pipeline.document import Document, OnBadRow
from data_pipeline.errors import DataError
from data_pipeline.sources.arrow_rows import check_text_column, documents_of
from data_pipeline.sources.remote_file import Place, RemoteFile, open_file
from data_pipeline.sources.row_text import LONGEST_ROW, check_no_twin, checked_text, file_identity, lacks_text
from data_pipeline.sources.stretch import WHOLE, Stretch, whole_file

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_MOST_ROWS, _MOST_NESTED = 256, 16  # rows that are read at once; of lists, whose repeated texts are multiplied
_MOST_CODED = 8  # times that a group is read of which each batch has all texts, as a dictionary, and of a row a number
_READ_BYTES = 1 << 24  # of a column, that so many rows take at most
_BUFFER_BYTES = 1 << 20  # of a column, in place of a whole group of rows


@dataclass(frozen=True)
class ParquetRows:
    """The rows of a Parquet file."""

    path: Place
    text_field: str
    longest: int = LONGEST_ROW

    size_bytes: None = None  # of the text: not known before reading

    def identity(self) -> list[str]:
        spec = [] if isinstance(self.path, RemoteFile) else [f"dataset:{self.path}"]  # as older versions read it
        return [*spec, *file_identity(self.path)]

    def stretches(self, size_bytes: int) -> list[Stretch]:
        if isinstance(self.path, RemoteFile):  # to know its row groups would take a request for each file
            return whole_file(self.path)
        with _opened(self.path, 0) as (table, _):
            groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
        return [Stretch(number, number + 1, group.total_byte_size) for number, group in enumerate(groups)] or [WHOLE]

    def documents(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[Document]:
        import pyarrow

        with _opened(self.path, stretch.size_bytes) as (table, by_dictionary):
            columns = self.columns(table.schema_arrow.names)
            self.check_columns(table.schema_arrow)
            metadata, types = table.metadata, [table.schema_arrow.field(name).type for name in columns]
            is_coded = all(map(pyarrow.types.is_dictionary, types))  # by who wrote it, as pandas does for categories
            groups = range(stretch.begin, min(stretch.end or metadata.num_row_groups, metadata.num_row_groups))
            number = sum(metadata.row_group(group).num_rows for group in range(stretch.begin))
            for group in groups:
                rows = _rows_at_once(metadata.row_group(group), columns)
                rows = max(1, min(rows, _READ_BYTES // (1 + _longest_repeated(by_dictionary, group, columns))))
                if is_coded:
                    rows = max(1, -(-metadata.row_group(group).num_rows // _MOST_CODED))
                for batch in table.iter_batches(rows, row_groups=[group], columns=columns):
                    place = f"{self.path}, row "
                    yield from documents_of(batch, number, place, "", self.longest, self.document_of, on_bad_row)
                    number += batch.num_rows

    def columns(self, names: Sequence[str]) -> list[str]:
        """Returns the columns to read. Raises DataError if the one with the text is not among `names`."""
        if self.text_field not in names:
            raise lacks_text(f"{self.path} has no column", self.text_field, list(names))
        check_no_twin(str(self.path), self.text_field, names)
        return [self.text_field]

    def check_columns(self, schema: "pyarrow.Schema") -> None:
        """Raises DataError if a column cannot hold what is read from it."""
        check_text_column(schema, self.text_field, str(self.path))

    def document_of(self, row: dict[str, Any], where: str) -> Document:
        """Returns the document in a row. Raises DataError if there is none."""
        return Document(where, [checked_text(row[self.text_field], self.text_field, where)])


@contextmanager
def _opened(
    path: Place, about_bytes: int
) -> "Iterator[tuple[pyarrow.parquet.ParquetFile, pyarrow.parquet.ParquetFile]]":
    """Opens a file, and the same with each text that it repeats once. What pyarrow raises inside is one message."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    options = {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
    with open_file(path, about_bytes) as stream:
        try:
            with ParquetFile(stream, **options) as table:
                kinds = {field.name: field.type for field in table.schema_arrow}
                texts = [name for name, kind in kinds.items() if kind in (pa.string(), pa.large_string())]
                yield table, ParquetFile(stream, read_dictionary=texts, metadata=table.metadata, **options)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk's
                raise
            reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
            raise DataError(f"{path} is not a whole parquet file ({reason}): fetch or write it again") from error


def _rows_at_once(group: Any, columns: Sequence[str]) -> int:
    """Returns how many rows to read at once, by the sizes of the columns in a group of rows."""
    found = (group.column(number) for number in range(group.num_columns))
    chunks = [chunk for chunk in found if chunk.path_in_schema.split(".")[0] in columns]
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    most = _MOST_ROWS if not any("." in chunk.path_in_schema for chunk in chunks) else _MOST_NESTED
    return max(1, min(most, _READ_BYTES * group.num_rows // max(1, size)))


def _longest_repeated(table: "pyarrow.parquet.ParquetFile", group: int, columns: Sequence[str]) -> int:
    """Returns the bytes of the longest text in the dictionaries of a group of rows, which its first row brings whole.

    Not all rows are read so: texts that are not repeated are added to the dictionary, which each batch has whole.
    """
    import pyarrow as pa
    from pyarrow import compute

    first = next(table.iter_batches(1, row_groups=[group], columns=columns), None)
    coded = [] if first is None else [one for one in first.columns if pa.types.is_dictionary(one.type)]
    return max((compute.max(compute.binary_length(one.dictionary)).as_py() or 0 for one in coded), default=0)
