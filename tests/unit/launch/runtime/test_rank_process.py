"""How a rank's process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.runtime.rank_process import LOST_OUTPUT_CODE

ROOT = Path(__file__).parents[4]
# Two ranks. While rank 0's interpreter is taken apart, rank 1 completes a collective that a thread of rank 0 waits for,
# and that thread then asks for the interpreter's lock.
SCRIPT = """
import atexit, os, sys, threading, time
import torch
import torch.distributed as dist
from launch.runtime.rank_process import run_to_the_end

reading, writing = os.pipe()
first = os.getpid()
rank = int(os.fork() == 0)
os.close((reading, writing)[rank])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
if rank == 1:
    if os.read(reading, 1):  # nothing where rank 0 has ended
        dist.all_reduce(torch.ones(3))
        while os.getppid() == first:  # gloo of rank 0 must not miss it
            time.sleep(0.01)
    os._exit(0)


class TakenApart:
    def __del__(self, write=os.write, writing=writing, sleep=time.sleep):  # the names of a module go first
        write(writing, b"x")
        sleep(10)  # it is aborted long before


held, taken_apart = dist.group.WORLD, TakenApart()
dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: None)
atexit.register(print, "what was to be done at the end")
threading.Thread(target=lambda: (time.sleep(0.3), print("waited for"))).start()
print("said")
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("run_to_the_end(lambda: 7)", 7),
        ("run_to_the_end(lambda: 1 / 0)", 1),
        pytest.param(
            "sys.exit(7)",
            -signal.SIGABRT,  # no longer so? Then `run_to_the_end` has become needless
            marks=pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads wait there"),
        ),
    ],
)
def test_a_rank_ends_with_its_code_whatever_the_threads_of_gloo_do(end: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{end}", end), str(tmp_path / "meeting")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.split("\n") == ["said", "waited for", "what was to be done at the end", ""]
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)


@pytest.mark.parametrize("module", ["train", "inference/generate", "inference/evaluate"])
def test_every_rank_ends_so(module: str) -> None:
    assert (ROOT / "launch" / f"{module}.py").read_text().count("    run_to_the_end(") == 1


def test_output_that_is_lost_is_told() -> None:
    code = "from launch.runtime.rank_process import run_to_the_end; print('x'); run_to_the_end(lambda: 0)"
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == LOST_OUTPUT_CODE and b"No space left" in done.stderr
