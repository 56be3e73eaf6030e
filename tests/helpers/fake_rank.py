"""A rank for tests of the local launcher, without torch: `python -m tests.helpers.fake_rank FOLDER BEHAVIOUR`.

It "trains" until it gets a signal, notes which, and ends with 75, as a rank that has saved. BEHAVIOUR: `save`, or
`crash`: rank 1 kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path, behaviour: str) -> None:
    rank, got = os.environ["RANK"], []

    def note(number: int, frame: object) -> None:
        got.append(number)
        with (folder / f"got_{rank}").open("a") as file:
            file.write(f"{signal.Signals(number).name}\n")

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    while not got:
        time.sleep(0.02)
        if behaviour == "crash" and rank == "1" and (folder / "pid_0").exists():
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 + 0.5 * int(rank))  # it finishes its step and saves; the others wait for the slowest
    sys.exit(75)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
