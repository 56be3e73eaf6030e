"""Takes the text out of a row, says why a row holds none, and tells two states of a file apart."""

import codecs
from collections.abc import Sequence
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.sources.remote_file import Place, RemoteFile

LONGEST_ROW = 1 << 24
"""Bytes of a row that are read: a line or an element of JSON, which takes 26 times as much as Python's objects, a row
of a table."""

_LEAST_HALVES = 8  # bytes 0, which by chance do not stand on even places alone, or on odd ones; or all of a short text


def too_long(where: str, longest: int) -> DataError:
    """Returns the message about a row that is not read, because it would take too much memory."""
    return DataError(f"{where} has more than {longest:,} bytes: cut the document, or raise --longest-row")


def is_utf16(content: bytes) -> bool:
    """Returns whether the beginning of a text is probably UTF-16 or UTF-32, with or without the mark of its order.

    UTF-8 has no byte 0 but that of the character 0; in UTF-16 it is half of each letter of Latin, line break or space.
    """
    first, second = content[::2].count(0), content[1::2].count(0)
    is_half = min(first, second) == 0 and max(first, second) >= max(1, min(_LEAST_HALVES, len(content) // 2))
    return content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or 0 in content[:2] or is_half


def not_utf8(where: str, content: bytes, byte: int | None = None) -> DataError:
    """Returns the message about `content` that is not UTF-8, from `byte` of its file on."""
    named = ", it looks like UTF-16" if is_utf16(content) else ""
    at = f" (byte {byte})" if byte is not None else ""
    return DataError(f"{where} is not UTF-8 text{at}{named}: convert it to UTF-8, or leave it out of the sources")


def lacks_text(problem: str, field: str, there: Sequence[str]) -> DataError:
    """Returns the message about a row or table without the field of the text, whose fields are `there`."""
    names, kind = set(there), "column" if problem.endswith("column") else "field"
    remedy = f"name the {kind} that holds the text with --text-field"
    if names & {"messages", "conversations"} or names >= {"prompt", "completion"}:
        remedy = f"these are conversations, give --chat, or {remedy}"
    if len(there) == 1 and (sign := next((sign for sign in ";\t|" if sign in there[0]), None)):
        remedy = f"its columns seem to be parted by {sign!r}: write the table with commas, or {remedy}"
    return DataError(f"{problem} {field!r} (it has {', '.join(map(repr, there)) or 'none'}): {remedy}")


def check_no_twin(where: str, field: str, there: Sequence[str]) -> None:
    """Raises DataError if several of the columns `there` have the name of the one that is read."""
    if there.count(field) > 1:
        raise DataError(
            f"{where} has more than one column {field!r}: give them names of their own, or name another one with "
            "--text-field"
        )


def text_of_row(row: dict[str, Any], field: str, where: str) -> str:
    """Returns the text in `field` of a row. Raises DataError if there is none."""
    if field not in row:
        for name, rows in row.items():
            if isinstance(rows, list) and rows and isinstance(rows[0], dict) and field in rows[0]:
                raise DataError(f"{where} holds rows in its list {name!r}: write that list alone into the file")
        raise lacks_text(f"{where} has no field", field, list(row))
    return checked_text(row[field], field, where)


def checked_text(text: Any, field: str, where: str) -> str:
    """Returns the value of a field. Raises DataError if it is no text."""
    if not isinstance(text, str):
        raise DataError(f"{where} has {type(text).__name__} in field {field!r}: it must hold a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where} has half of a surrogate pair in field {field!r}, which is no text: write it anew"
        ) from None
    return text


def file_identity(place: Place) -> list[str]:
    """Returns path, size and modification time of a file; of a remote one what its server tells of its content."""
    if isinstance(place, RemoteFile):
        return place.identity()
    status = place.stat()
    return [str(place.absolute()), str(status.st_size), str(status.st_mtime_ns)]
