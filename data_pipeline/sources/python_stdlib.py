"""The sources of Python's standard library: text that every machine has."""

import sysconfig
from pathlib import Path

from data_pipeline.errors import DataError

_NOT_TRAINING_TEXT = {
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__",
}  # fmt: skip


def python_stdlib_sources() -> list[Path]:
    """Returns the files of Python's standard library, sorted: text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _NOT_TRAINING_TEXT.intersection(path.relative_to(root).parts) and _is_utf8(path)
    ]
    if not sources:
        raise DataError(f"the Python standard library at {root} has no .py sources: give text files of your own")
    return sources


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
