"""UTF-8 text files, each one document, and the cutting of any source's documents into bounded pieces.

A document longer than PIECE_CHARACTERS is cut, so that encoding it takes bounded memory. The cut is where
byte-level BPE splits anyway: after a single line break, else before a single space, between two characters
that are not white space; the tokens are then the same as without the cut.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data_pipeline.errors import DataError

_BLOCK_BYTES = 1 << 20
PIECE_CHARACTERS = 1 << 20
_CUT_WINDOW = 1 << 16  # characters before the limit in which a break is searched
_LINE_BREAK = re.compile(r"(?<=\S)\n(?=\S)")
_SPACE = re.compile(r"(?<=\S) (?=\S)")


class TextPiece(NamedTuple):
    """A part of a document that is encoded by itself."""

    text: str  # never empty
    begins_document: bool
    ends_document: bool
    where: str  # file and line or row of the document, for a sentence


def cut_document(blocks: Iterable[str], where: str) -> Iterator[TextPiece]:
    """Yields the pieces of one document given as consecutive blocks of text; none for an empty document."""
    pending, begins = "", True
    for block in blocks:
        pending += block
        while len(pending) > PIECE_CHARACTERS:
            cut = _cut_position(pending)
            yield TextPiece(pending[:cut], begins, ends_document=False, where=where)
            pending, begins = pending[cut:], False
    if pending:
        yield TextPiece(pending, begins, ends_document=True, where=where)


def _cut_position(text: str) -> int:
    """Returns a position in [1, PIECE_CHARACTERS], below len(text)."""
    window_start = PIECE_CHARACTERS - _CUT_WINDOW
    for pattern, keep in ((_LINE_BREAK, 1), (_SPACE, 0)):
        places = [match.start() for match in pattern.finditer(text, window_start, PIECE_CHARACTERS)]
        if places:
            return places[-1] + keep
    return PIECE_CHARACTERS


def file_identity(path: Path) -> list[str]:
    """Returns path, size and modification time of a file."""
    status = path.stat()
    return [str(path.absolute()), str(status.st_size), str(status.st_mtime_ns)]


@dataclass(frozen=True)
class TextFile:
    """A text file, which is one document."""

    path: Path

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def identity(self) -> list[str]:
        return file_identity(self.path)

    def pieces(self) -> Iterator[TextPiece]:
        return cut_document(self._blocks(), str(self.path))

    def _blocks(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = 0
        with self.path.open("rb") as stream:
            while True:
                block = stream.read(_BLOCK_BYTES)
                held_back = len(decoder.getstate()[0])  # bytes of a character that the last block cut
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{self.path} is not UTF-8 text (byte {position - held_back + error.start}): convert it to "
                        "UTF-8, or leave it out of the sources"
                    ) from error
                if not block:
                    return
                yield text.removeprefix("\ufeff") if position == 0 else text
                position += len(block)
