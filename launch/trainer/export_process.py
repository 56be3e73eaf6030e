"""The child that exports one checkpoint to a Hugging Face folder while the run goes on: checkpoint_hooks starts it.

`python -m launch.trainer.export_process PARENT CHECKPOINT HF_DIR DTYPE VALIDATE`; DTYPE `-` takes the checkpoint's.
The process runs at low priority unless training has ended, ends when the process PARENT ends, and prints lines of
JSON: its progress (activity, done, total), and at the end a summary.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from launch.errors import USER_ERROR_CODE, USER_ERRORS
from launch.runtime.printing import say
from launch.runtime.processes import end_with_parent

NICENESS = 10
PROGRESS_EVERY_S = 1.0


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # what is half-written is removed on the way


class _ProgressLines:
    """Prints progress: the beginning of an activity, and then at most one line a second."""

    def __init__(self) -> None:
        self._activity, self._printed_at = "", 0.0

    def __call__(self, activity: str, done: int, total: int) -> None:
        if activity != self._activity or time.monotonic() - self._printed_at >= PROGRESS_EVERY_S:
            self._activity, self._printed_at = activity, time.monotonic()
            print(json.dumps({"activity": activity, "done": done, "total": total}), flush=True)


def main(parent: str, checkpoint: str, hf_dir: str, dtype: str, validate: str) -> int:
    """Runs the export and returns the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    end_with_parent(int(parent))
    if validate != "True":  # training goes on beside this
        os.nice(NICENESS)
    from launch.conversion.huggingface.exporting import export_hugging_face

    try:
        summary = export_hugging_face(
            Path(checkpoint),
            Path(hf_dir),
            dtype=None if dtype == "-" else dtype,
            overwrite=True,
            validate=validate == "True",
            report=_ProgressLines(),
        )
    except USER_ERRORS as error:
        say(error, file=sys.stderr)
        return USER_ERROR_CODE
    print(json.dumps(asdict(summary)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
