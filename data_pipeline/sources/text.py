"""A UTF-8 text file: one document, read block by block."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.sources.pieces import TextPiece, cut_document, file_identity

_BLOCK_BYTES = 1 << 20


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
        return cut_document(self._blocks())

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
