"""Rows of conversations, in files of JSON and in data sets: a document is one conversation, as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.chat.conversation import CHAT_FIELDS, conversation_of_row
from data_pipeline.document import Document
from data_pipeline.errors import DataError
from data_pipeline.sources.hf_dataset import HfDataset
from data_pipeline.sources.json_rows import JsonRows
from data_pipeline.sources.parquet import ParquetRows
from data_pipeline.sources.row_text import LONGEST_ROW, check_no_twin


@dataclass(frozen=True)
class ChatRows(JsonRows):
    """The conversations of a file of JSON lines, or of one array."""

    text_field: str = "messages"  # for sentences

    @property
    def example(self) -> str:
        return '{"messages": [...]}'

    def document_of(self, row: dict[str, Any], where: str) -> Document:
        return _document(row, where)


class ChatDataset(HfDataset):
    """The conversations of a data set, in the columns of the same names."""

    def __init__(self, spec: str, typed: str | None = None, longest: int = LONGEST_ROW) -> None:
        super().__init__(spec, "messages", typed, longest)

    def _parquet_rows(self, file: Path) -> ParquetRows:
        return ChatParquet(file, longest=self.longest)

    def _document_of(self, row: dict[str, Any], where: str) -> Document:
        return _document(_without_none(row), where)

    def _columns(self, rows: Any) -> Any:
        features = rows.features
        if features is None:
            return rows
        return rows.select_columns(_chat_columns(features, self.typed))


@dataclass(frozen=True)
class ChatParquet(ParquetRows):
    """The conversations of a Parquet file, in the columns of the same names."""

    text_field: str = "messages"  # for sentences

    def document_of(self, row: dict[str, Any], where: str) -> Document:
        return _document(_without_none(row), where)

    def columns(self, names: Sequence[str]) -> list[str]:
        return _chat_columns(names, str(self.path))

    def check_columns(self, schema: Any) -> None:
        """Leaves it to each row whether it is a conversation."""


def _chat_columns(names: Iterable[str], where: str) -> list[str]:
    """Returns the columns of conversations. Raises DataError if there is none: the rows would be empty, and none."""
    there = list(names)
    columns = [name for name in CHAT_FIELDS if name in there]
    for name in columns:
        check_no_twin(where, name, there)
    if not {"messages", "conversations", "completion"} & set(columns):
        raise DataError(
            f"{where} has no column of conversations (it has {', '.join(map(repr, there)) or 'none'}): name one "
            "'messages', 'conversations', or two 'prompt' and 'completion'"
        )
    return columns


def _without_none(value: Any) -> Any:
    """Returns a value without empty fields: a column's objects all have the fields that one of them has."""
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _document(row: dict[str, Any], where: str) -> Document:
    text = conversation_of_row(row, where).as_json()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} has half of a surrogate pair, which is no text: write it anew") from None
    return Document(where, [text])
