"""Several ranks on this machine, forked from a server that has torch and DeepSpeed imported already.

What they run is an ordinary function of (rank, *arguments) at module level. A rank that fails, dies or hangs is a
`RankFailure` with that rank's traceback.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from launch.local import free_port
from launch.processes import end_with_parent

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["launch.warm_imports"])


class RankFailure(RuntimeError):
    """Ranks that did not finish: why, in one sentence, and the traceback of one that said so."""

    def __init__(self, sentence: str, rank_traceback: str = "") -> None:
        super().__init__(sentence)
        self.rank_traceback = rank_traceback
        self.add_note(rank_traceback)


def warm_up(environment: Mapping[str, str]) -> None:
    """Starts the fork server, which imports in the background; `environment` is what all ranks will see."""
    # a rank may import the module that warms up, before it knows its parent process
    if multiprocessing.current_process().name == "MainProcess":
        os.environ.update(environment)
        forkserver.ensure_running()


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120) -> list[Any]:
    """`function(rank, *arguments)` on `world_size` ranks; the results in rank order. Raises RankFailure."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_rank_main, args=(theirs, function, rank, world_size, port, timeout_s, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=deadline - time.monotonic())
        if not ready:
            silent = sorted(set(range(len(pipes))) - set(results))
            raise RankFailure(f"no answer from ranks {silent} within the time limit")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailure(f"rank {rank} died") from None
            if not succeeded:
                raise RankFailure(f"rank {rank}: {value[0]}", value[1])
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    arguments: tuple[Any, ...],
) -> None:
    end_with_parent()
    os.dup2(2, 1)  # what libraries print is not the command's answer
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        import torch

        from megalite.engine.distributed import start_distributed

        torch.set_num_threads(1)
        start_distributed(rank, timeout=timedelta(seconds=timeout_s))
        # by value: `pipe.send` would hand torch tensors over as file descriptors that die with this process
        result = pickle.dumps((True, function(rank, *arguments)))
    except BaseException as error:
        last_line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        result = pickle.dumps((False, (last_line, traceback.format_exc())))
    with contextlib.suppress(BrokenPipeError):  # the command is gone
        pipe.send_bytes(result)
    # rank 0 serves the store that others may still be meeting through: all stay until `run_ranks` ends them
    threading.Event().wait()
