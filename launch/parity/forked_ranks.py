"""Runs several ranks on this machine, forked from a server that has already imported torch and DeepSpeed.

Ranks run an ordinary module-level function of (rank, *arguments). If a rank fails, dies or hangs, `RankFailure` is
raised with its traceback.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from launch.runtime.processes import end_with_parent
from launch.runtime.started_modules import FORK_SERVER_PRELOAD
from megalite.distributed.rank_admission import FOLDER, private_folder

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([FORK_SERVER_PRELOAD])


class RankFailure(RuntimeError):
    """Raised when ranks do not finish: the reason, in one sentence, and the traceback of the rank that failed."""

    def __init__(self, sentence: str, rank_traceback: str = "") -> None:
        super().__init__(sentence)
        self.rank_traceback = rank_traceback
        self.add_note(rank_traceback)


def warm_up(environment: Mapping[str, str], imports: Sequence[str] = ()) -> None:
    """Starts the fork server, which imports in the background. All ranks get `environment`; `imports` are further
    modules that each rank would import otherwise."""
    # a rank that is still starting may import the module that calls this
    if multiprocessing.current_process().name == "MainProcess":
        os.environ.update(environment)
        _CONTEXT.set_forkserver_preload([FORK_SERVER_PRELOAD, *imports])
        forkserver.ensure_running()


class RankProcesses:
    """Processes that run `target(pipe, rank, world_size, folder, *arguments)`, each with the other end of its pipe.

    `folder` is where they meet; nobody else can open it.
    """

    def __init__(self, target: Callable[..., None], world_size: int, *arguments: Any) -> None:
        self._resources = contextlib.ExitStack()
        folder = self._resources.enter_context(private_folder())
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                ours, theirs = _CONTEXT.Pipe()
                self.pipes.append(ours)
                process = _CONTEXT.Process(
                    target=target, args=(theirs, rank, world_size, folder, *arguments), daemon=True
                )
                process.start()
                self.processes.append(process)
                theirs.close()
        except BaseException:
            self.kill()
            raise

    def answers(self, deadline: float) -> list[Any]:
        """Returns the result of each rank, in rank order. `deadline` is a value of time.monotonic().

        Raises RankFailure with the first failure that is received.
        """
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailure(f"no answer from ranks {sorted(waiting.values())} within the time limit")
            for pipe in self.pipes:
                if pipe in ready:
                    rank = waiting[pipe]
                    try:
                        # from a child that this process has forked, over a pipe that only the two of them hold
                        succeeded, value = pickle.loads(pipe.recv_bytes())
                    except (EOFError, ConnectionResetError):
                        raise RankFailure(f"rank {rank} died") from None
                    if not succeeded:
                        raise RankFailure(f"rank {rank}: {value[0]}", value[1])
                    results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        """Kills all processes, waits for them, and removes the folder where they met."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self._resources.close()


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120) -> list[Any]:
    """Runs `function(rank, *arguments)` on `world_size` ranks; returns results in rank order. Raises RankFailure."""
    ranks = RankProcesses(_rank_main, world_size, function, timeout_s, arguments)
    try:
        return ranks.answers(time.monotonic() + timeout_s)
    finally:
        ranks.kill()


def become_rank(rank: int, world_size: int, folder: Path) -> None:
    """Prepares the process of a rank: sets its environment, before anything else runs."""
    end_with_parent()
    gc.freeze()  # a garbage collection of forked objects would copy their pages
    os.dup2(2, 1)  # stdout is for the result of the command, not for what libraries print
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), FOLDER: str(folder)}


def answer(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Runs `function(*arguments)` and returns the message of a rank: its result, or its exception."""
    try:
        # by value: `pipe.send` would pass torch tensors as file descriptors that close with this process
        return pickle.dumps((True, function(*arguments)))
    except BaseException as error:
        last_line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        return pickle.dumps((False, (last_line, traceback.format_exc())))


def join_world(rank: int, timeout: timedelta) -> None:
    """Joins the process group; each rank uses one thread, because ranks share few cores."""
    import torch

    from megalite.engine.deepspeed.process_groups import start_distributed

    torch.set_num_threads(1)
    start_distributed(rank, timeout=timeout)


def _rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    folder: Path,
    function: Callable[..., Any],
    timeout_s: float,
    arguments: tuple[Any, ...],
) -> None:
    become_rank(rank, world_size, folder)

    def joined() -> Any:
        join_world(rank, timedelta(seconds=timeout_s))
        return function(rank, *arguments)

    with contextlib.suppress(BrokenPipeError):  # the command has exited
        pipe.send_bytes(answer(joined))
    # other ranks may still communicate with this one: all wait until `run_ranks` kills them
    threading.Event().wait()
