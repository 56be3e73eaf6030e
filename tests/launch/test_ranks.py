"""How a rank's process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Two ranks. While rank 0's interpreter is taken apart, rank 1 completes a collective that a thread of rank 0 waits for,
# and that thread then asks for the interpreter's lock.
SCRIPT = """
import atexit, os, sys, time
import torch
import torch.distributed as dist
from launch.ranks import leave

reading, writing = os.pipe()
rank = int(os.fork() == 0)
os.close((reading, writing)[1 - rank])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
if rank == 1:
    if os.read(reading, 1):  # nothing where rank 0 has ended
        dist.all_reduce(torch.ones(3))
        time.sleep(2)
    os._exit(0)


class TakenApart:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(writing, b"x")
        sleep(1)


held, taken_apart = dist.group.WORLD, TakenApart()
dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: None)
atexit.register(print, "what was to be done at the end")
print("said", end=" ")
{end}(7)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("leave", 7),
        ("sys.exit", -signal.SIGABRT),  # no longer so? Then `leave` has become needless
    ],
)
def test_a_rank_ends_with_its_code_whatever_the_threads_of_gloo_do(end: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{end}", end), str(tmp_path / "meeting")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == code
    assert done.stdout == "said what was to be done at the end\n"
