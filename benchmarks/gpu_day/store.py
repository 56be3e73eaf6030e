"""Results on disk: a JSON file for each part, kept apart by hardware, and only trusted where code and machine agree.

A part's items (one training, one family) are written as they end: a part that is stopped goes on with the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "runs" / "gpu_day"  # git ignores it
SOURCES = ("megalite", "models", "data_pipeline", "launch", "benchmarks/gpu_day")
PASSED, FAILED, RUNNING, OVER_LIMIT = "passed", "failed", "running", "over its limit"


def code_digest(root: Path = ROOT) -> str:
    """All that decides what is computed, as hexadecimal digits: a file's name or content that changes, changes it."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".yaml") and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def folder_name(machine: Mapping[str, Any], tiny: bool) -> str:
    """E.g. `nvidia-h200`; results of the small try are never taken for those of the machine."""
    name = re.sub(r"[^a-z0-9]+", "-", str(machine["accelerator"]).lower()).strip("-") or "unknown"
    return f"{name}-tiny" if tiny else name


class ResultStore:
    """Results of one kind of machine."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder = folder
        self.key = dict(key)  # code, hardware, versions and options: results with another one are measured again

    def path(self, part: str) -> Path:
        return self.folder / f"{part}.json"

    def read(self, part: str) -> dict[str, Any] | None:
        """Whatever the file holds, of this key or another; None where there is none, or it is damaged."""
        try:
            value = json.loads(self.path(part).read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) and isinstance(value.get("items"), dict) else None

    def current(self, part: str) -> dict[str, Any] | None:
        """The result of this code on this machine."""
        found = self.read(part)
        return found if found is not None and found.get("key") == self.key else None

    def has_passed(self, part: str) -> bool:
        found = self.current(part)
        return found is not None and found.get("status") == PASSED

    def begin(self, part: str, again: bool) -> dict[str, Any]:
        """The record of a part that starts now; items that ended well are kept, unless all is done `again`."""
        earlier = None if again else self.current(part)
        kept = {name: item for name, item in (earlier or {}).get("items", {}).items() if item.get("passed")}
        record = {"part": part, "status": RUNNING, "key": self.key, "started": now(), "items": kept}
        self.write(part, record)
        return record

    def end(self, part: str, status: str, seconds: float, problem: str = "") -> dict[str, Any]:
        """Writes how a part ended, over whatever its own process has written last."""
        record = self.current(part) or {"part": part, "key": self.key, "items": {}}
        record |= {"status": status, "seconds": round(seconds, 1), "problem": problem, "ended": now()}
        self.write(part, record)
        return record

    def write(self, part: str, record: Mapping[str, Any]) -> None:
        """Whole or not at all: the process may be killed meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f".{part}.{os.getpid()}.new"
        new.write_text(json.dumps(record, indent=1, default=str) + "\n")
        new.replace(self.path(part))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
