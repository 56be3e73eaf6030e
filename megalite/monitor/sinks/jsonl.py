"""`metrics.jsonl`: one object per step, appended as it happens; always on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends to `path` after dropping what an interrupted run logged beyond the step it resumes from."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = [record for record in read_records(path) if record["step"] <= resumed_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(_line(record) for record in kept))
        temporary.replace(path)
        self._file = path.open("a", buffering=1)

    def log(self, record: dict[str, Any]) -> None:
        self._file.write(_line(record))

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a run, a half-written last line left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the run was killed while writing this line
    return records


def _line(record: dict[str, Any]) -> str:
    # JSON has no NaN or infinity: a skipped step's norm is null
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"
