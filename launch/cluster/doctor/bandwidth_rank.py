"""Process on each host that measures links: `python -m launch.cluster.doctor.bandwidth_rank LIMIT_S`.

Input: the environment of torch.distributed, and a secret of this measurement. Output: one line on stdout, a prefix and
a JSON object. The process ends with its parent, and after LIMIT_S in any case.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from launch.runtime.processes import PR_SET_PDEATHSIG
from megalite.distributed.errors import RendezvousFailed

if TYPE_CHECKING:
    import torch

PREFIX = "bandwidth "  # marks the result among the output of libraries
REPEATS = 5
PINGS = 50
SMALL, LARGE = 64 << 10, {"cpu": 16 << 20, "cuda": 256 << 20}  # bytes
LONG_ENOUGH_S = 0.05  # a transfer of this duration can be measured


def phases(size: int) -> list[list[tuple[int, int]]]:
    """Groups the links of a ring of ranks so that no rank has two links in the same phase."""
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    last = [ring.pop()] if size % 2 else []
    return [phase for phase in (ring[::2], ring[1::2], last) if phase]


class BandwidthMeasurement:
    """Measurements of one rank with the others. All ranks call the same methods in the same order."""

    def __init__(self, limit_s: float) -> None:
        import torch
        import torch.distributed as dist

        from megalite.distributed.rendezvous import Rendezvous

        on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
        self._device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self._dist, self._finish = dist, torch.cuda.synchronize if on_gpu else lambda: None
        timeout = timedelta(seconds=limit_s)
        met = Rendezvous(timeout)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=met.store, rank=met.rank, world_size=met.world_size, timeout=timeout
        )
        self._payload = torch.zeros(LARGE[self._device.type] // 4, device=self._device)
        self._one = self._payload[:1].clone()

    def run(self) -> dict[str, Any]:
        """Measures an all-reduce over all ranks, then each link of the ring."""
        rank = self._dist.get_rank()
        result = {"backend": self._dist.get_backend(), "all_reduce": self._all_reduce()}
        for phase in phases(self._dist.get_world_size()):
            self._dist.barrier()
            for sender, receiver in phase:
                if rank == sender:
                    result["link"] = self._link(receiver, begins=True)
                elif rank == receiver:
                    self._link(sender, begins=False)
        self._dist.barrier()
        return result

    def _all_reduce(self) -> dict[str, float]:
        def slowest(seconds: float) -> float:
            self._one.fill_(seconds)
            self._dist.all_reduce(self._one, self._dist.ReduceOp.MAX)
            return float(self._one.item())

        return self._measure(lambda tensor: self._dist.all_reduce(tensor), slowest)

    def _link(self, other: int, begins: bool) -> dict[str, float]:
        """Measures one link; the rank with `begins` sends the payload and gets one number back."""

        def exchange(tensor: torch.Tensor) -> None:
            for message, sends in ((tensor, begins), (self._one, not begins)):
                (self._dist.send if sends else self._dist.recv)(message, other)

        def sender_time(seconds: float) -> float:
            value = self._one.clone().fill_(seconds)
            exchange(value)
            return float(value.item())

        return self._measure(exchange, sender_time)

    def _measure(self, work: Callable[[torch.Tensor], None], agree: Callable[[float], float]) -> dict[str, float]:
        """Measures `work` with one number, and with a payload just large enough to take LONG_ENOUGH_S.

        `agree` turns the time of each rank into the time that all ranks use for the choice of the payload.
        """
        latency_s = self._seconds(work, self._one, PINGS)
        count = SMALL
        while (
            count < self._payload.nbytes and agree(self._seconds(work, self._payload[: count // 4], 1)) < LONG_ENOUGH_S
        ):
            count *= 4
        seconds = self._seconds(work, self._payload[: count // 4], REPEATS)
        return {"latency_s": latency_s, "bytes": count, "seconds": seconds}

    def _seconds(self, work: Callable[[torch.Tensor], None], tensor: torch.Tensor, repeats: int) -> float:
        """Returns the median time of `repeats` calls; a first call, which connects, is not counted."""
        taken = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            work(tensor)
            self._finish()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])


def main(limit_s: float) -> None:
    """Runs the measurement and prints its result."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get("PARENT_PROCESS", os.getppid())):
        return  # the parent has died already
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM is not caught and ends the process
    try:
        print(f"{PREFIX}{json.dumps(BandwidthMeasurement(limit_s).run())}", flush=True)
    except RendezvousFailed as error:
        sys.exit(str(error))
    os._exit(0)  # without cleaning up: the others have passed the last barrier too


if __name__ == "__main__":
    main(float(sys.argv[1]))
