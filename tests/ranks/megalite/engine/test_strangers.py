"""A program that joins a run as one of its ranks, as torch does, without the run's secret: it is met by nobody."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from launch.runtime.local_ranks import free_port
from megalite.engine.meeting_place import SECRET, new_secret

LIMIT = timedelta(seconds=60)


class Payload:
    """Writes a file where it is unpickled, but for the process that sends it."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"__import__('os').getpid() == {os.getpid()} or open({self.file!r}, 'w').close()",)


def _rank(folder: Path, rank: int, port: int, secret: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", SECRET: secret}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from megalite.engine.agreement import is_same_on_all_ranks
    from megalite.engine.distributed import start_distributed

    (folder / f"ready_{rank}").touch()
    _wait_for(folder / "go")
    start_distributed(rank, LIMIT)
    (folder / f"said_{rank}").write_text(str(is_same_on_all_ranks("fingerprint of the data")))


def _stranger(folder: Path, port: int) -> None:
    import torch.distributed as dist

    (folder / "ready_stranger").touch()
    end = time.monotonic() + LIMIT.total_seconds()
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.002)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=1, world_size=2, timeout=LIMIT)
    dist.all_gather_object([None, None], Payload(folder / "ran"))  # noqa: TID251 - the attack itself


def _wait_for(file: Path) -> None:
    end = time.monotonic() + LIMIT.total_seconds()
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.001)


def test_a_stranger_that_takes_a_rank_s_place_runs_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    """It polls the port, which every user of a host can see, and is there before the real rank 1."""
    context, port, secret = multiprocessing.get_context("forkserver"), free_port(), new_secret()
    ranks = [context.Process(target=_rank, args=(tmp_path, rank, port, secret), daemon=True) for rank in range(2)]
    processes = [*ranks, context.Process(target=_stranger, args=(tmp_path, port), daemon=True)]
    for process in processes:
        process.start()
    try:
        for name in ("0", "1", "stranger"):
            _wait_for(tmp_path / f"ready_{name}")
        (tmp_path / "go").touch()
        for rank in range(2):
            ranks[rank].join(LIMIT.total_seconds())
        assert not (tmp_path / "ran").exists(), "it ran code in rank 0"
        assert [(tmp_path / f"said_{rank}").read_text() for rank in range(2)] == ["True", "True"]
    finally:
        for process in processes:
            process.kill()
            process.join()
