"""`loss.png` and `report.html`, drawn at a run's end by a process of its own, which may outlive the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from shlex import quote

from launch.runtime.rank_environment import VARIABLES
from launch.runtime.started_modules import LAST_PICTURES, python_command
from megalite.config import Config
from megalite.distributed.rank_admission import FOLDER
from megalite.monitor.observer import Observer
from megalite.resilience.signals import STOP_SIGNALS

AT_MOST_S = 30.0  # 200,000 steps take 5


class RunPictures(Observer):
    """Starts the process on rank 0, and waits for it where nobody else would (`launch/runtime/local_ranks.py` does).

    After a crash there is no page: it would say that the run goes on, because its process still lives, and would delay
    a restart.
    """

    name = "loss.png and report.html"

    def __init__(self, config: Config) -> None:
        self._run_dir, self._has_page = config.run_dir, config.monitor.report
        self._files = ["loss.png"] * config.monitor.plot

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        self._files += ["report.html"] * self._has_page

    def close(self) -> None:
        """Raises TimeoutError after AT_MOST_S."""
        if not self._files:
            return
        is_awaited = FOLDER in os.environ  # by the command that has started all ranks, which kills after some seconds
        # what is ignored here is ignored there
        before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS} if is_awaited else {}
        process = subprocess.Popen(
            python_command(LAST_PICTURES, str(self._run_dir), *self._files),
            stdin=subprocess.DEVNULL,
            env={key: value for key, value in os.environ.items() if key not in VARIABLES}
            | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            process_group=0,  # Ctrl-C is for the ranks
        )
        for number, handler in before.items():
            signal.signal(number, handler)
        try:
            if not is_awaited:
                process.wait(AT_MOST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            by_hand = f"`megalite report {quote(str(self._run_dir))}` writes the page"
            raise TimeoutError(f"they took longer than {AT_MOST_S:.0f} s; {by_hand}") from None
