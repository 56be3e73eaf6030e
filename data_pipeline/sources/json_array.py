"""The elements of one array of JSON, or objects over several lines, read one after another: never all in memory."""

import codecs
import json
from collections.abc import Iterator
from io import BufferedReader
from itertools import count
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.sources.row_text import not_utf8, too_long

_BLOCK_BYTES = 1 << 18
_WANTED = "one array of JSON objects, or one object after another"
_SPACE = " \t\r\n"
_DECODER = json.JSONDecoder()


def rows_over_lines(stream: BufferedReader, path: str, longest: int) -> Iterator[tuple[str, Any]]:
    """Yields the elements of an array, or values that follow each other, each with its place.

    Raises DataError for what is not JSON, or for too long an element.
    """
    text = _Text(stream, path)
    if not text.take("["):
        for number in count():
            if not text.next_sign():
                return
            yield (where := f"{path}, row {number}"), text.value(where, longest)
    number = 0
    while not (text.take("]") and not number):
        where = f"{path}, row {number}"
        yield where, text.value(where, longest)
        number += 1
        if text.take("]"):
            break
        if not text.take(","):
            why = "is not followed by a comma or the end of the array" if text.next_sign() else "ends a cut array"
            raise DataError(f"{where} {why}: put {_WANTED}")
    if text.next_sign():
        raise DataError(f"{path} has something behind its array of JSON: put {_WANTED}, and nothing else")


def not_json(error: Exception, where: str, wanted: str) -> DataError:
    why = str(error).rsplit(":", 1)[0]
    if isinstance(error, json.JSONDecodeError) and ("Unterminated" in why or error.pos >= len(error.doc.rstrip())):
        why += ", it ends too early"
    return DataError(f"{where} is not JSON ({why}): put {wanted}")


class _Text:
    """The characters of a stream from a place on, as many as are needed."""

    def __init__(self, stream: BufferedReader, path: str) -> None:
        self._stream, self._path = stream, path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._place, self._ended, self._bytes = "", 0, False, 0

    def next_sign(self) -> str:
        """Moves to the next character that is no space, and returns it; an empty text at the end."""
        while True:
            while self._place < len(self._text) and self._text[self._place] in _SPACE:
                self._place += 1
            if self._place < len(self._text) or not self._more(_BLOCK_BYTES):
                return self._text[self._place : self._place + 1]

    def take(self, sign: str) -> bool:
        """Moves over the next character if it is `sign`."""
        found = self.next_sign() == sign
        self._place += found
        return found

    def value(self, where: str, longest: int) -> Any:
        """Returns the value that begins here, and moves behind it."""
        self.next_sign()
        while True:
            failure = None
            try:
                value, end = _DECODER.raw_decode(self._text, self._place)
            except (ValueError, RecursionError) as error:  # also a number of too many digits
                failure = error
            if failure is None and (end < len(self._text) or self._ended):  # else a number may go on
                if end - self._place > longest:
                    raise too_long(where, longest)
                self._place = end
                return value
            held = len(self._text) - self._place
            if held > longest:
                is_whole = isinstance(failure, json.JSONDecodeError) and failure.pos < len(self._text) - _BLOCK_BYTES
                raise not_json(failure, where, _WANTED) if failure and is_whole else too_long(where, longest)
            if not self._more(max(_BLOCK_BYTES, held)) and failure is not None:
                raise not_json(failure, where, _WANTED) from failure

    def _more(self, count: int) -> bool:
        """Adds about `count` bytes of the stream, and lets go of what has been read; False at its end."""
        if self._ended:
            return False
        block = self._stream.read(count)
        self._ended = not block
        try:
            self._text, self._place = self._text[self._place :] + self._decoder.decode(block, final=not block), 0
        except UnicodeDecodeError as error:  # of what the decoder held back of the last block, and of this one
            at = self._bytes + len(block) - len(error.object) + error.start
            raise not_utf8(self._path, block, at) from error
        self._bytes += len(block)
        return not self._ended
