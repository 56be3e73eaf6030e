"""A rank for tests of the local launcher, without torch: `python -m tests.helpers.fake_rank FOLDER BEHAVIOUR`.

It "trains" until it gets a signal, notes which, and ends with the code of a rank that has saved. BEHAVIOUR: `save`;
`crash`: rank 1 kills itself; `fail`: rank 1 ends with 3 and rank 0 does not mind SIGTERM; `hang`: signals are noted and
that is all; `import`: it takes no signals yet; `draw`: it is done at once, and rank 0's picture takes three seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megalite.resilience.signals import exit_code_for


def main(folder: Path, behaviour: str) -> None:
    rank, got = os.environ["RANK"], []
    if behaviour == "draw":
        from launch.trainer import run_pictures

        written = f"open({str(folder / 'loss.png')!r}, 'w').write(str(os.getppid()))"
        command = [sys.executable, "-c", f"import os, time; time.sleep(3); {written}"]
        vars(run_pictures)["python_command"] = lambda *_: command
        config: Any = SimpleNamespace(run_dir=folder, monitor=SimpleNamespace(plot=rank == "0", report=False))
        run_pictures.RunPictures(config).close()
        (folder / f"pid_{rank}").write_text(str(os.getpid()))
        return
    if behaviour == "import":
        (folder / f"pid_{rank}").write_text(str(os.getpid()))
        time.sleep(60)

    def note(number: int, frame: object) -> None:
        got.append(number)
        with (folder / f"got_{rank}").open("a") as file:
            file.write(f"{signal.Signals(number).name}\n")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)
    (folder / f"environment_{rank}").write_text(json.dumps(dict(os.environ)))
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    while not got or behaviour == "hang":
        time.sleep(0.02)
        if rank == "1" and (folder / "pid_0").exists():
            if behaviour == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            elif behaviour == "fail":
                sys.exit(3)
    time.sleep(0.5 + 0.5 * int(rank))  # it finishes its step and saves; the others wait for the slowest
    sys.exit(exit_code_for(got[0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
