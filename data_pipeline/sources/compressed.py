"""Files that are read through a decompressor, chosen by their ending."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from data_pipeline.errors import DataError
from data_pipeline.sources.remote_file import Place, RemoteFile, open_file, size_of

_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_BUFFER_BYTES = 1 << 18


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

    Raises DataError, where it is read, if it is damaged or cut short.
    """
    if not is_compressed(path):
        with open_file(path, about_bytes) as stream:
            yield stream
        return
    import pyarrow

    try:
        source = path.open(about_bytes) if isinstance(path, RemoteFile) else str(path)
        with pyarrow.input_stream(source, compression=_CODECS[path.suffix]) as content:
            yield io.BufferedReader(cast(io.RawIOBase, content), _BUFFER_BYTES)
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the decompressor's
            raise
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path} is not a complete {_CODECS[path.suffix]} file ({reason}): fetch or compress it again"
        ) from error
