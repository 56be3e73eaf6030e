"""UTF-8 text files, plain or compressed: each is one document."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.document import Document, OnBadRow
from data_pipeline.errors import DataError
from data_pipeline.sources.compressed import open_text, refuse_other_kind, size_of_text
from data_pipeline.sources.remote_file import Place
from data_pipeline.sources.row_text import file_identity, is_utf16, not_utf8
from data_pipeline.sources.stretch import WHOLE, Stretch, whole_file

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class TextFile:
    """A text file, which is one document."""

    path: Place

    @property
    def size_bytes(self) -> int | None:
        return size_of_text(self.path)

    def identity(self) -> list[str]:
        return file_identity(self.path)

    def stretches(self, size_bytes: int) -> list[Stretch]:
        return whole_file(self.path)

    def documents(self, on_bad_row: OnBadRow, stretch: Stretch = WHOLE) -> Iterator[Document]:
        yield Document(str(self.path), self.blocks(about_bytes=stretch.size_bytes))

    def blocks(self, begin: int = 0, end: int | None = None, *, about_bytes: int = 0) -> Iterator[str]:
        """Yields the text from byte `begin` to byte `end`, in blocks. Raises DataError if it is not UTF-8.

        A file that is compressed is read whole. about_bytes: of the file that will be read; 0 if it is not known.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = begin
        with open_text(self.path, about_bytes) as stream:
            if begin:
                stream.seek(begin)
            else:
                refuse_other_kind(stream, self.path)
            while True:
                block = stream.read(_BLOCK_BYTES if end is None else min(_BLOCK_BYTES, end - position))
                held_back = len(decoder.getstate()[0])  # bytes of a character that the last block cut
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise not_utf8(str(self.path), block, position - held_back + error.start) from error
                if "\0" in text:  # which no text has, and UTF-16 between its letters
                    if is_utf16(block):
                        raise not_utf8(str(self.path), block)
                    at = position - held_back + len(text.partition("\0")[0].encode())
                    raise DataError(
                        f"{self.path} has the character 0 in it (byte {at}), so it is no text: remove it, or leave the "
                        "file out of the sources"
                    )
                if not block:
                    return
                yield text.removeprefix("\ufeff") if position == 0 else text
                position += len(block)
