"""Stretches of a source that are read one by one, by different processes."""

from typing import NamedTuple

from data_pipeline.sources.compressed import is_compressed
from data_pipeline.sources.remote_file import OF_WEB, Place, RemoteFile, size_of

_TIMES_COMPRESSED = 4  # a text is about so much longer than its compressed file
_SHORTEST_REMOTE = 1 << 22  # bytes: each stretch of a remote file costs two requests or more


class Stretch(NamedTuple):
    """A stretch of a source. What `begin` and `end` count is the source's own matter: bytes, rows, files.

    A document belongs to the stretch in which it begins. The stretches of a source are disjoint and hold all of it.
    """

    begin: int
    end: int | None  # exclusive; None: to the end of the source
    size_bytes: int  # about, for grouping and for what is fetched ahead; 0 if it is not known


WHOLE = Stretch(0, None, 0)


def whole_file(place: Place) -> list[Stretch]:
    """Returns the one stretch of a file that is read from its beginning to its end."""
    return [Stretch(0, None, (size_of(place) or 0) * (_TIMES_COMPRESSED if is_compressed(place) else 1))]


def byte_stretches(place: Place, size_bytes: int) -> list[Stretch]:
    """Cuts a file into stretches of `size_bytes` bytes; the last one goes on to wherever the file ends.

    A file of a web server, which may know no ranges, is one stretch.
    """
    size = size_of(place)
    if size is None or (isinstance(place, RemoteFile) and place.url.startswith(OF_WEB)):
        return whole_file(place)
    if isinstance(place, RemoteFile):
        size_bytes = max(size_bytes, _SHORTEST_REMOTE)
    begins = range(0, max(size, 1), size_bytes)
    return [Stretch(begin, begin + size_bytes, size_bytes) for begin in begins[:-1]] + [
        Stretch(begins[-1], None, size - begins[-1])
    ]
