"""Sessions of a run without the seconds of a whole command: real ranks that run `launch.train`, forked warm.

A session is one start of a run's processes. What a test has of its ranks are handles: to send signals to, to wait for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from launch.runtime.local_ranks import free_port
from tests.helpers import fork_server  # noqa: F401 - it is started

CONTEXT = multiprocessing.get_context("forkserver")
LONGEST_S = 120.0  # a session of a tiny model takes a second
Fault = tuple[
    Callable[..., None], tuple[Any, ...]
]  # a function at module level, and its arguments after folder and rank


class Session:
    """The ranks of one start, while a `session` is open."""

    def __init__(self, folder: Path, words: Sequence[str], world_size: int, fault: Fault | None) -> None:
        self.folder, self.ranks = folder, list[BaseProcess]()
        port = free_port()
        for rank in range(world_size):
            arguments = (folder, rank, world_size, port, list(words), fault)
            process = CONTEXT.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            self.ranks.append(process)
        self.began = time.monotonic()

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """A signal to some ranks, by default all; those that have ended do not mind."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            pid = self.ranks[rank].pid
            if pid is not None and self.ranks[rank].is_alive():
                os.kill(pid, number)

    def wait(self, timeout_s: float = LONGEST_S) -> list[int | None]:
        """The exit codes once all ranks have ended; fails where one does not."""
        deadline = time.monotonic() + timeout_s
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        assert None not in codes, f"after {timeout_s:g} s the exit codes are {codes}\n{self.output()}"
        return codes

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = LONGEST_S) -> None:
        """Returns once `condition` holds; fails where a rank ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            alive = all(process.is_alive() for process in self.ranks)
            assert alive and time.monotonic() < deadline, f"ended, or takes too long\n{self.output()}"
            time.sleep(0.005)

    def one_has_ended(self, timeout_s: float = LONGEST_S) -> bool:
        """Waits until a rank has ended, as a launcher does."""
        return bool(wait([process.sentinel for process in self.ranks], timeout_s))

    def end(self, grace_s: float = 0.0) -> list[int | None]:
        """Kills the ranks that have not ended by themselves in time; the exit codes of all."""
        deadline = time.monotonic() + grace_s
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        for process in self.ranks:
            process.join()
        return [process.exitcode for process in self.ranks]

    def output(self, rank: int | None = None) -> str:
        """What a rank, by default each, has said on stdout and stderr."""
        ranks = range(len(self.ranks)) if rank is None else [rank]
        return "".join(f"--- rank {r}\n{_output_of(self.folder, r).read_text(errors='replace')}" for r in ranks)


@contextmanager
def session(
    folder: Path, config: dict[str, Any], *overrides: str, world_size: int = 2, fault: Fault | None = None
) -> Iterator[Session]:
    """Ranks that train; what is left of them is killed when this closes.

    `fault` is called in each rank before it starts, as `function(folder, rank, *arguments)`. `folder` gets what ranks
    say and their process ids; the run's own is `config["run_dir"]`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        _output_of(folder, rank).write_text("")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    running = Session(folder, [str(path), *overrides], world_size, fault)
    try:
        yield running
    finally:
        running.end()


def train(
    folder: Path, config: dict[str, Any], *overrides: str, world_size: int = 2, fault: Fault | None = None
) -> str:
    """A session to its good end; what rank 0 has said."""
    with session(folder, config, *overrides, world_size=world_size, fault=fault) as running:
        assert running.wait() == [0] * world_size, running.output()
        return running.output(0)


def pid_of(folder: Path, rank: int) -> int:
    """Process id of a rank of the session that last started in `folder`."""
    return int((folder / f"pid_{rank}").read_text())


def _output_of(folder: Path, rank: int) -> Path:
    return folder / f"output_{rank}.txt"


def _rank_main(folder: Path, rank: int, world_size: int, port: int, words: list[str], fault: Fault | None) -> None:
    descriptor = os.open(_output_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    import launch.train as job

    job.PROCESS_START_TIME = time.monotonic()  # not that of the fork server
    torch.set_num_threads(1)
    if fault is not None:
        function, arguments = fault
        function(folder, rank, *arguments)
    sys.exit(job.main(words))
