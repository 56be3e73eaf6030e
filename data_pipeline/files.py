"""Durable small file operations: a file appears under its final name whole, or not at all."""

import hashlib
import os
import re
from pathlib import Path
from typing import BinaryIO


def with_ending(prefix: Path, ending: str) -> Path:
    """Returns PREFIX + ending; unlike Path.with_suffix it keeps dots inside the prefix."""
    return prefix.parent / (prefix.name + ending)


def is_url(text: str) -> bool:
    """True for `https://...`, `s3://...` and the like."""
    return bool(re.match(r"[A-Za-z][\w+.-]*://", text))


def open_anew(path: Path) -> BinaryIO:
    """Creates a file for writing in the place of what is there, which may be somebody's link or pipe."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def publish(temporary: Path, final: Path) -> None:
    """Moves a completely written and fsynced file to its final name, durably."""
    temporary.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes the file so that readers see its old content or the new one, never a part."""
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open_anew(temporary) as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk is reported without a name
        raise


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
