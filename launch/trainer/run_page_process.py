"""`report.html`: the page about a run, written at its end by a process of its own, which may fail or take long."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shlex import join

from launch.runtime.logs import get_logger
from launch.runtime.rank_environment import VARIABLES
from launch.runtime.started_modules import COMMAND_LINE, python_command
from megalite.monitor.observer import Observer

log = get_logger(__name__)

AT_MOST_S = 30.0  # 200,000 steps take 5
LONGEST_REASON = 300  # characters


class RunPageProcess(Observer):
    """Writes the page when training has ended as it should; on rank 0.

    After a crash it does not: the page would say that the run goes on, because its process still lives, and would delay
    a restart.
    """

    name = "report.html"

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._has_ended = run_dir, False

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        self._has_ended = True

    def close(self) -> None:
        """Raises RuntimeError, or TimeoutError after AT_MOST_S."""
        if not self._has_ended:
            return
        command = ["report", str(self._run_dir)]
        try:
            done = subprocess.run(
                python_command(COMMAND_LINE, *command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=AT_MOST_S,
                check=False,
                env={key: value for key, value in os.environ.items() if key not in VARIABLES}
                | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                process_group=0,  # Ctrl-C is for the ranks
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it took longer than {AT_MOST_S:.0f} s; `megalite {join(command)}` writes it") from None
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2][:LONGEST_REASON]
            raise RuntimeError(reason.removeprefix("megalite: error: ") or f"its process ended with {done.returncode}")
        log.info(f"wrote {self._run_dir / self.name}")
