"""Files of JSON, plain or compressed: a document is the text in one field of an object.

`.jsonl` and `.ndjson` hold an object on each line; blank lines are skipped. `.json` holds the same, as many data sets
name it, or one array of objects, or objects that are written over several lines.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from data_pipeline.document import Document, OnBadRow
from data_pipeline.errors import DataError
from data_pipeline.sources.compressed import is_compressed, name_inside, open_text, refuse_other_kind, size_of_text
from data_pipeline.sources.json_array import not_json, rows_over_lines
from data_pipeline.sources.lines import first_line, place_of_line
from data_pipeline.sources.remote_file import Place
from data_pipeline.sources.row_text import LONGEST_ROW, file_identity, not_utf8, text_of_row, too_long
from data_pipeline.sources.stretch import WHOLE, Stretch, byte_stretches, whole_file

_LOOKED_AT = 1 << 12  # bytes, to tell an array
_LINES = "one JSON object on each line"
_ARRAY = "or name the file .json, which may hold one array, or objects over several lines"


@dataclass(frozen=True)
class JsonRows:
    """The rows of a file of JSON lines or, where `may_be_array`, of one array or of objects over several lines."""

    path: Place
    text_field: str
    may_be_array: bool = False
    longest: int = LONGEST_ROW

    @property
    def size_bytes(self) -> int | None:
        return size_of_text(self.path)

    def identity(self) -> list[str]:
        if name_inside(self.path).endswith(".jsonl"):
            return file_identity(self.path)
        return [*file_identity(self.path), "rows of JSON"]  # older versions read it as one text

    def stretches(self, size_bytes: int) -> list[Stretch]:
        if is_compressed(self.path):
            return whole_file(self.path)
        if self.may_be_array:
            with open_text(self.path, _LOOKED_AT) as stream:
                if _has_no_lines(stream):
                    return whole_file(self.path)
        return byte_stretches(self.path, size_bytes)

    def documents(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[Document]:
        for where, row in self.rows(on_bad_row, stretch):
            try:
                if not isinstance(row, dict):
                    remedy = f", {_ARRAY}" if isinstance(row, list) and not self.may_be_array else ""
                    raise DataError(f"{where} is not a JSON object: write {self.example} on each line{remedy}")
                yield self.document_of(row, where)
            except DataError as error:
                on_bad_row(error)

    @property
    def example(self) -> str:
        """A row with a document, for sentences."""
        return f'{{"{self.text_field}": "..."}}'

    def document_of(self, row: dict[str, Any], where: str) -> Document:
        """Returns the document in a row. Raises DataError if there is none."""
        return Document(where, [text_of_row(row, self.text_field, where)])

    def rows(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[tuple[str, Any]]:
        """Yields the values on the lines that begin in a stretch, each with its place, or those of an array."""
        with open_text(self.path, stretch.size_bytes) as stream:
            if not stretch.begin:
                refuse_other_kind(stream, self.path)
            if not stretch.begin and self.may_be_array and _has_no_lines(stream):
                yield from rows_over_lines(stream, str(self.path), self.longest)
                return
            number, position, end = 0, first_line(stream, stretch), stretch.end
            while (end is None or position < end) and (line := stream.readline(self.longest + 1)):
                number += 1
                where = place_of_line(self.path, number, stretch)
                position += len(line)
                if len(line) > self.longest:  # 10 MB of gzip may hold 10 GB
                    on_bad_row(too_long(where, self.longest))
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(self.longest)
                        position += len(line)
                elif line.strip():
                    is_open = number == 1 and not self.may_be_array and _is_open(line)
                    try:
                        value = parsed(line, where, f"{_LINES}, {_ARRAY}" if is_open else _LINES)
                    except DataError as error:
                        on_bad_row(error)
                    else:
                        yield where, value


def _has_no_lines(stream: BufferedReader) -> bool:
    start = stream.peek(_LOOKED_AT).lstrip().removeprefix(b"\xef\xbb\xbf").lstrip()
    return _is_open(start[: start.find(b"\n") + 1] or start[:1])


def _is_open(line: bytes) -> bool:
    """Returns whether a first line begins an array, or an object that goes on in the next line."""
    is_cut_in_text = line.replace(rb"\"", b"").count(b'"') % 2  # which a damaged row may be
    goes_on = line[-1:] == b"\n" and line.rstrip()[-1:] in (b"{", b"[", b",")
    return line.lstrip()[:1] == b"[" or (goes_on and not is_cut_in_text)


def begins_with_row(path: Path) -> bool:
    """Returns whether the first line of a file is an object of JSON."""
    with open_text(path, _LOOKED_AT) as stream:
        try:
            return isinstance(json.loads(stream.readline(LONGEST_ROW)), dict)
        except (ValueError, RecursionError):
            return False


def parsed(content: bytes, where: str, wanted: str) -> Any:
    """Returns the value in `content`. Raises DataError, which asks for what is `wanted`, if it is not JSON."""
    if 0 in content[:2]:  # every other byte of UTF-16
        raise not_utf8(where, content)
    try:
        return json.loads(content.decode("utf-8-sig", "surrogatepass"))  # of bytes, it would take UTF-16 too
    except UnicodeDecodeError as error:
        raise not_utf8(where, content) from error
    except (ValueError, RecursionError) as error:  # also a number of too many digits, and what is nested too deeply
        raise not_json(error, where, wanted) from error
