"""A program that joins a run as one of its ranks, as torch does, without the run's secret: the run ends."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from launch.runtime.local_ranks import free_port
from megalite.distributed.errors import MessageRefused, RendezvousFailed
from megalite.distributed.rank_admission import SECRET, new_secret

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
    from megalite.distributed.rendezvous import Rendezvous
    from megalite.engine.deepspeed.process_groups import start_distributed

    rendezvous = Rendezvous(LIMIT)
    if rank:  # it is late, as on a host that is slower
        _wait_for(folder / "said_0")
    try:
        start_distributed(rank, LIMIT, rendezvous)
        rendezvous.check_members()
        said = "all are known"
    except (MessageRefused, RendezvousFailed) as error:
        said = str(error)
    (folder / f"saying_{rank}").write_text(said)
    (folder / f"saying_{rank}").rename(folder / f"said_{rank}")


def _stranger(folder: Path, port: int, sends: str) -> None:
    """Finds torch's keys among those of the store, and is in the group before rank 1."""
    import torch.distributed as dist

    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    while not (names := {key.partition("/")[0] for key in store.list_keys()} - {"megalite", "init"}):
        time.sleep(0.005)
    (name,) = names
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=1, world_size=2, timeout=LIMIT)
    if sends == "a pickle":
        dist.all_gather_object([None, None], Payload(folder / "ran"))  # noqa: TID251 - the attack itself
    else:
        from megalite.distributed.agreement import from_all_ranks

        from_all_ranks("0" * 64, str)


def _wait_for(file: Path) -> None:
    end = time.monotonic() + LIMIT.total_seconds()
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("sends", "sentence"),
    [
        ("a proof", r"^rank 1 does not know this run's secret: another program .* has joined at 127.0.0.1:\d+: start"),
        (
            "a pickle",
            r"^rank 1 was to send str and announced or sent .*: is it a rank of this run, of the same version\?",
        ),
    ],
)
def test_a_stranger_that_takes_a_rank_s_place_runs_nothing_and_is_told(
    sends: str, sentence: str, tmp_path: Path
) -> None:
    """Both ranks have proven the secret to each other. The stranger has not, and is faster than rank 1."""
    context, port, secret = multiprocessing.get_context("forkserver"), free_port(), new_secret()
    processes = [context.Process(target=_rank, args=(tmp_path, rank, port, secret), daemon=True) for rank in range(2)]
    processes.append(context.Process(target=_stranger, args=(tmp_path, port, sends), daemon=True))
    for process in processes:
        process.start()
    try:
        _wait_for(tmp_path / "said_0")
        assert not (tmp_path / "ran").exists(), "it ran code in rank 0"
        assert re.search(sentence, (tmp_path / "said_0").read_text())
    finally:
        for process in processes:
            process.kill()
            process.join()
