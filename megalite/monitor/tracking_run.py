"""The run of a tracking service that a run folder belongs to, by its name there: every session goes on with it."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.checkpoint.safe_files import read_small_file, write_small_file

log = logging.getLogger(__name__)
LONGEST_BYTES = 1 << 13
NAME = re.compile(r"[^\x00-\x1f/\\]{1,128}")


class TrackingRun:
    """One file of a run folder. A copy of the folder is another run, a folder that was moved is the same."""

    def __init__(self, run_dir: Path, service: str) -> None:
        self._path, self._place, self._service = run_dir / f"{service}_run.json", str(run_dir.resolve()), service

    def name(self) -> str | None:
        """Returns the name that an earlier session has kept; None where there is none, or it is that of a copy."""
        known: Any = None
        with suppress(OSError, ValueError, RecursionError):
            known = json.loads(read_small_file(self._path, LONGEST_BYTES, trusted=True))
        if not isinstance(known, dict) or not isinstance(name := known.get("run"), str) or not NAME.fullmatch(name):
            return None
        if self._place != known.get("folder") and self._path.stat().st_ino != known.get("inode"):
            log.info(f"this run folder is a copy of {known.get('folder')}: it gets a run of its own in {self._service}")
            return None
        return name

    def keep(self, name: str) -> None:
        """Keeps a name for the sessions to come."""
        try:
            write_small_file(self._path, b"")
            facts = {"run": name, "folder": self._place, "inode": self._path.stat().st_ino}
            write_small_file(self._path, json.dumps(facts).encode() + b"\n")
        except OSError as error:
            log.warning(f"the next session will be another run in {self._service}, since this one is not kept: {error}")
