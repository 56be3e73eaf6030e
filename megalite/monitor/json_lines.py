"""Files of one JSON object per line that several sessions of a run append to, any of which may be killed in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append_line(path: Path, line: str) -> None:
    """Appends one line; OSError where it cannot.

    Opened anew each time, so that a full disk harms no other line than its own. A kill during an earlier write may
    have left half a line: the new one starts on a line of its own. One append of the kernel's: threads do not mix
    their lines.
    """
    data = line.encode()
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                data = b"\n" + data
        file.write(data)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All objects in the order of their writing. Lines that a kill left half-written are passed over."""
    if not path.is_file():
        return []
    objects = []
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects
