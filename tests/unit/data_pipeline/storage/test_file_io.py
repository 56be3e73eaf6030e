"""A file that is read at random places is the one that was opened, or the reader is told."""

import os
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.storage import file_io as files
from data_pipeline.storage.file_io import RandomAccessFile


@pytest.fixture
def stored(tmp_path: Path) -> RandomAccessFile:
    path = tmp_path / "c.bin"
    path.write_bytes(bytes(range(200)))
    return RandomAccessFile(path)


def read(stored: RandomAccessFile, place: int, count: int) -> list[int]:
    into = np.empty(count, dtype=np.uint8)
    stored.read(place, into.data)
    return into.tolist()


def test_any_place_is_read(stored: RandomAccessFile) -> None:
    assert (read(stored, 7, 3), read(stored, 200, 0)) == ([7, 8, 9], [])
    with pytest.raises(DataError, match=r"c\.bin became shorter while it was in use"):
        read(stored, 199, 2)


def test_a_file_that_was_only_touched_is_read_on(stored: RandomAccessFile) -> None:
    os.utime(stored.path, (1, 1))
    assert read(stored, 0, 1) == [0]


def test_another_file_in_its_place_is_refused(stored: RandomAccessFile) -> None:
    """After its descriptor was closed in favour of others, the name may mean other data: half a run on each."""
    read(stored, 0, 1)
    other = stored.path.with_name("other")
    other.write_bytes(bytes(200))
    os.utime(other, (1, 1))
    other.replace(stored.path)
    assert read(stored, 7, 1) == [7], "the open descriptor is of the old file"
    files._opened.cache_clear()
    with pytest.raises(DataError, match=r"c\.bin was replaced while it was in use"):
        read(stored, 7, 1)
    stored.path.unlink()
    with pytest.raises(DataError, match=r"c\.bin was removed while it was in use"):
        read(stored, 7, 1)
