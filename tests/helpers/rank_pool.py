"""Ranks for tests that live on from one call to the next: on the CPU, one thread each, because they share few cores.

A pool is as many processes as its world has ranks, forked once, which keep their imports and their process group. A
task is a function at module level, sent by name. After each task a rank puts back what the task has changed (see
rank_state.py); one that cannot, fails, dies or hangs ends its pool, and the next call forks another.

`run_fresh_ranks` has processes of their own for one call: for tasks that patch modules in place, end their process,
measure it, or are about how a rank starts.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.parity.forked_ranks import RankFailure, RankProcesses, answer, become_rank, join_world
from launch.parity.forked_ranks import run_ranks as run_fresh_ranks
from tests.helpers import fork_server  # noqa: F401 - it is started

__all__ = ["RankFailure", "close_pools", "renewals", "run_fresh_ranks", "run_ranks"]

MOST_RANKS = 16  # that live at once in one pytest process, 60 MB each: pools not used for longest make room
MEETING_S = 60.0  # what ranks have to put back what a task has changed
PUT_BACK = b""  # a message that is no task


class _Pool:
    """RankProcesses that wait for tasks."""

    def __init__(self, world_size: int) -> None:
        self._ranks = RankProcesses(_serve, world_size)
        self._is_putting_back = False

    def run(self, task: bytes, timeout_s: float) -> list[Any]:
        """The results of a task, in rank order; the next one must wait until the pool `is_ready`."""
        deadline = time.monotonic() + timeout_s
        self._send(task)
        results = self._ranks.answers(deadline)
        self._send(PUT_BACK)  # while the test looks at the results
        self._is_putting_back = True
        return results

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died: its answer will be missed
            for pipe in self._ranks.pipes:
                pipe.send_bytes(message)

    def whats_left(self) -> str:
        """What the last task has left in a rank that cannot be put back; empty where all is as it was."""
        try:
            left = self._ranks.answers(time.monotonic() + MEETING_S) if self._is_putting_back else []
        except RankFailure as failure:
            return str(failure)
        self._is_putting_back = False
        if not all(process.is_alive() for process in self._ranks.processes):
            return "a rank has died since"
        return ", ".join(sorted({one for found in left for one in found}))

    def kill(self) -> None:
        self._ranks.kill()


_POOLS: dict[int, _Pool] = {}  # by world size, the one used last at the end
_RENEWALS: list[str] = []


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 300) -> list[Any]:
    """`function(rank, *arguments)` on `world_size` ranks; the results in rank order. Raises RankFailure."""
    task = pickle.dumps((Path.cwd(), sys.path, timeout_s, pickle.dumps((function, arguments))))
    try:
        return _pool_of(world_size).run(task, timeout_s)
    except BaseException:  # pytest's own time limit is one
        close_pool(world_size)
        raise


def renewals() -> list[str]:
    """Why pools were replaced although no task had failed: a sentence for each."""
    return list(_RENEWALS)


def _pool_of(world_size: int) -> _Pool:
    pool = _POOLS.get(world_size)
    if pool is not None and (left := pool.whats_left()):
        _RENEWALS.append(f"{world_size} ranks: {left}")
        close_pool(world_size)
        pool = None
    if pool is None:
        while _POOLS and sum(_POOLS) + world_size > MOST_RANKS:
            close_pool(next(iter(_POOLS)))
        pool = _Pool(world_size)
    _POOLS.pop(world_size, None)  # to the end
    _POOLS[world_size] = pool
    return pool


def close_pool(world_size: int) -> None:
    """Ends the ranks of one world size, if there are any."""
    pool = _POOLS.pop(world_size, None)
    if pool is not None:
        pool.kill()


@atexit.register
def close_pools() -> None:
    """Ends all ranks that live; later calls start others."""
    for world_size in list(_POOLS):
        close_pool(world_size)


def _serve(pipe: Connection, rank: int, world_size: int, folder: Path) -> None:
    """A rank's life: what has become of joining the world is its answer to the first task."""
    become_rank(rank, world_size, folder)
    joined = answer(join_world, rank, timedelta(minutes=2))
    has_joined, _ = pickle.loads(joined)
    if has_joined:
        from tests.helpers.rank_state import RankState

        state = RankState()
    with contextlib.suppress(EOFError, BrokenPipeError):  # pytest is gone
        while True:
            message = pipe.recv_bytes()
            if not has_joined:
                pipe.send_bytes(joined)
            elif message == PUT_BACK:
                pipe.send_bytes(answer(state.put_back))
            else:
                pipe.send_bytes(answer(_perform, rank, message))
    os._exit(0)


def _perform(rank: int, message: bytes) -> Any:
    import torch.distributed as dist

    from megalite.engine.deepspeed.internals import set_timeout

    folder, path, timeout_s, task = pickle.loads(message)
    os.chdir(folder)
    sys.path[:] = path
    set_timeout(dist.group.WORLD, timedelta(seconds=timeout_s))
    function, arguments = pickle.loads(task)  # with the path of today: it imports the test's module
    return function(rank, *arguments)
