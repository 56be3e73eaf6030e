"""Opens text files, through a decompressor where their ending names one, and says why one cannot be read."""

import codecs
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from data_pipeline.errors import DataError
from data_pipeline.sources.remote_file import Place, RemoteFile, open_file, size_of
from data_pipeline.sources.row_text import is_utf16, not_utf8

_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".xz": "xz"}
_BUFFER_BYTES = 1 << 18
_FED_BYTES = 1 << 10  # at once: each may become 32 MiB of text
_USUAL_WINDOW = 1 << 27  # bytes, up to which pyarrow reads zstd
_LARGEST_WINDOW = 1 << 31
_XZ_MEMORY = 1 << 31
_HEAD_BYTES = 1 << 10
_END_BYTES = 9  # one more than the sum and the length at the end of a gzip member
_ZSTD_SKIPPED = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18", re.DOTALL)
_BEGINNINGS = {
    "gzip": b"\x1f\x8b",
    "zstd": b"\x28\xb5\x2f\xfd",
    "bz2": b"BZh",
    "lz4": b"\x04\x22\x4d\x18",
    "xz": b"\xfd7zXZ\x00",
    "zip": b"PK",
    "7z": b"7z\xbc\xaf",
    "Parquet": b"PAR1",
    "Arrow": b"ARROW1",
    "encrypted PGP": b"-----BEGIN PGP",
    "encrypted age": b"age-encryption.org",
}
"""The first bytes of files, by what they are."""
_CUT, _FOLLOWED, _DICTIONARY, _MEMORY = (
    "Truncated",
    "incorrect header check|unknown compression method|no magic header|Unknown frame|frameType_unknown|Input format",
    "Dictionary",
    "too much memory|Memory usage limit",
)
"""Words of the decompressors' errors: too little data, something else behind it, a dictionary, a limit."""


def is_compressed(path: Place) -> bool:
    return path.suffix in _CODECS


def name_inside(path: Place) -> str:
    """Returns the file's name without the ending of its compression."""
    return path.name.removesuffix(path.suffix) if is_compressed(path) else path.name


def size_of_text(path: Place) -> int | None:
    """Returns the size of the file's text in bytes; None if it is not known before reading."""
    return None if is_compressed(path) else size_of(path)


@contextmanager
def open_text(path: Place, about_bytes: int = 0) -> Iterator[io.BufferedReader]:
    """Opens the file, of which `about_bytes` will be read, for reading, decompressed.

    Raises DataError, where it is read, if it is damaged, cut short, or something else than its ending says.
    """
    if not is_compressed(path):
        with open_file(path, about_bytes) as stream:
            yield stream
        return
    import pyarrow

    try:
        with _decompressed(path, about_bytes) as content:
            yield io.BufferedReader(content, _BUFFER_BYTES)
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the decompressor's
            raise
        raise DataError(f"{path} {_what_is_wrong(path, str(error).partition(chr(10))[0])}") from error


def refuse_other_kind(stream: io.BufferedReader, path: Place) -> None:
    """Raises DataError where the first bytes of a file are of no text, but of a compressed file, or of UTF-16."""
    start = stream.peek(_HEAD_BYTES)
    kind = next((kind for kind, bytes_ in _BEGINNINGS.items() if start.startswith(bytes_)), None)
    if kind is not None and not (_BEGINNINGS[kind].isascii() and _is_text(start[:_HEAD_BYTES])):
        if is_compressed(path):
            raise DataError(f"{path} holds {kind} data again inside its {_CODECS[path.suffix]} data: unpack it once")
        raise DataError(f"{path} is a {kind} file by its first bytes, and no text: give it the ending of what it is")
    if is_utf16(start[:_HEAD_BYTES]):
        raise not_utf8(str(path), start)


def _is_text(start: bytes) -> bool:
    """Returns whether the beginning of a file may be one of text that happens to begin with `PK` or `BZh`."""
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False


def _decompressed(path: Place, about_bytes: int) -> io.RawIOBase:
    codec = _CODECS[path.suffix]
    if codec == "xz":
        xz = partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY)
        return _Decompressed(open_file(path, about_bytes), xz, lzma.LZMAError)
    if codec == "gzip" and (isinstance(path, RemoteFile) or _is_filled_up(path)):
        return _Decompressed(open_file(path, about_bytes), partial(zlib.decompressobj, 31), zlib.error)
    if codec == "zstd":
        import zstandard

        if _window(_head(path)) > _USUAL_WINDOW:
            zstd = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj
            return _Decompressed(open_file(path, about_bytes), zstd, zstandard.ZstdError)
    import pyarrow

    source = path.open(about_bytes) if isinstance(path, RemoteFile) else str(path)
    return cast(io.RawIOBase, pyarrow.input_stream(source, compression=codec))


class _Decompressed(io.RawIOBase):
    """The text of a file for which pyarrow has no decompressor; one for each of its members is made by `begin`."""

    def __init__(self, source: io.BufferedReader, begin: Callable[[], Any], failure: type[Exception]) -> None:
        self._source, self._begin, self._failure = source, begin, failure
        self._member: Any = None
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            if self._member is None or self._member.eof:
                rest = b"" if self._member is None else self._member.unused_data
                data, self._member = rest.lstrip(b"\0"), self._begin()
                while not data and (block := self._source.read(_FED_BYTES)):
                    data = block.lstrip(b"\0")  # between members may be zeros
                if not data:
                    self._member = None
                    return 0
            elif not (data := self._source.read(_FED_BYTES)):
                raise OSError("Truncated compressed stream")
            try:
                self._text = memoryview(self._member.decompress(data))
            except self._failure as error:
                raise OSError(str(error)) from error
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


def _head(path: Place) -> bytes:
    with open_file(path, _HEAD_BYTES) as stream:
        return stream.read(_HEAD_BYTES)


def _is_filled_up(path: Path) -> bool:
    """Returns whether a file here ends in more zeros than the end of a gzip member can have, as tapes fill blocks.

    The end of a remote one is not looked at: that would be a request of its own, which many servers do not answer.
    """
    if path.stat().st_size < _END_BYTES:
        return False
    with path.open("rb") as stream:
        stream.seek(-_END_BYTES, io.SEEK_END)
        return not any(stream.read(_END_BYTES)) and _head(path).startswith(_BEGINNINGS["gzip"])


def _window(head: bytes) -> int:
    """Returns how many bytes of text the first frame of zstd refers back to; 0 where there is none."""
    import zstandard

    try:
        return zstandard.get_frame_parameters(head).window_size
    except zstandard.ZstdError:
        return 0


def _what_is_wrong(path: Place, reason: str) -> str:
    """Returns a clause about a file that a decompressor has given up, and what to do."""
    codec, head = _CODECS[path.suffix], _head(path)
    whole = head.startswith(_BEGINNINGS[codec]) or (codec == "zstd" and _ZSTD_SKIPPED.match(head) is not None)
    if not whole:
        found = next((name for name, first in _BEGINNINGS.items() if head.startswith(first)), None)
        page = head.lstrip()[:1] == b"<"
        kind = f"it is a {found} file" if found else "it is a web page" if page else "its first bytes are no such data"
        return f"is no {codec} file, {kind}: give it the ending of what it is, or fetch it again"
    if re.search(_CUT, reason):
        size = size_of(path)
        at = f" after {size:,} bytes" if size is not None else ""
        return f"is not a complete {codec} file, it ends{at} inside its data: it was cut short, fetch it again"
    if re.search(_MEMORY, reason):
        how = "with `zstd -d --long=31`" if codec == "zstd" else f"with `{codec} -d`"
        return f"is a whole {codec} file for all that is known, but takes too much memory to be read: unpack it {how}"
    if re.search(_DICTIONARY, reason):
        return "was compressed with a dictionary, which is not known here: unpack it with `zstd -d -D DICTIONARY`"
    if re.search(_FOLLOWED, reason):
        return f"has something else than {codec} data behind its first part ({reason}): unpack it and give the result"
    return f"is damaged inside ({codec}: {reason}): fetch it again, or compress the text again"
