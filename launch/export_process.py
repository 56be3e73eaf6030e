"""The process that makes one Hugging Face folder beside a run.

`python -m launch.export_process PARENT CHECKPOINT HF_DIR DTYPE VALIDATE`; DTYPE `-`: as the checkpoint says. It gives
way to training, ends with PARENT, and prints a summary.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from launch.errors import USER_ERROR_CODE, USER_ERRORS
from launch.processes import end_with_parent

NICENESS = 10


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # what is half-written is removed on the way


def main(parent: str, checkpoint: str, hf_dir: str, dtype: str, validate: str) -> int:
    """The exit code."""
    signal.signal(signal.SIGTERM, _leave)
    end_with_parent(int(parent))
    os.nice(NICENESS)
    from launch.convert import export_hugging_face

    try:
        summary = export_hugging_face(
            Path(checkpoint),
            Path(hf_dir),
            dtype=None if dtype == "-" else dtype,
            overwrite=True,
            validate=validate == "True",
        )
    except USER_ERRORS as error:
        print(error, file=sys.stderr)
        return USER_ERROR_CODE
    print(json.dumps(asdict(summary)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
