"""The rows of Arrow's tables as documents, one after another: a repeated text would take much as texts of Python."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from data_pipeline.document import Document, OnBadRow
from data_pipeline.errors import DataError
from data_pipeline.sources.row_text import too_long

if TYPE_CHECKING:
    import pyarrow


def documents_of(
    table: "pyarrow.Table | pyarrow.RecordBatch",
    first: int,
    before: str,
    after: str,
    longest: int,
    document_of: Callable[[dict[str, Any], str], Document],
    on_bad_row: OnBadRow,
) -> Iterator[Document]:
    """Yields the documents of rows, which are numbered from `first` on; messages say `before`, the number, `after`."""
    may_be_long = table.nbytes > longest
    for number, values in enumerate(zip(*table.columns, strict=True), start=first):
        where = f"{before}{number}{after}"
        try:
            if may_be_long and sum(map(_size, values)) > longest:
                raise too_long(where, longest)
            row = {name: value.as_py() for name, value in zip(table.column_names, values, strict=True)}
            yield document_of(row, where)
        except DataError as error:
            on_bad_row(error)
        except UnicodeDecodeError:
            on_bad_row(DataError(f"{where} is not UTF-8 text: convert it to UTF-8"))


def _size(value: Any) -> int:
    """Returns the bytes of a value that is a text or a list; 0 for others."""
    import pyarrow as pa

    if isinstance(value, pa.DictionaryScalar):
        value = value.value
    if isinstance(value, pa.ListScalar | pa.LargeListScalar):
        return value.values.nbytes if value.is_valid else 0
    text = value.as_buffer() if isinstance(value, pa.BinaryScalar | pa.StringScalar | pa.LargeStringScalar) else None
    return text.size if text is not None else 0


def check_text_column(schema: "pyarrow.Schema", name: str, where: str) -> None:
    """Raises DataError if a column holds lists or objects, which are no text in any row."""
    import pyarrow as pa

    kind = schema.field(name).type
    if pa.types.is_nested(kind):
        raise DataError(f"{where} has {kind} in column {name!r}: it must hold strings")
