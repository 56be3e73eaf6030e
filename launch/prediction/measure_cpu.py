"""Measures the CPU of this machine for `this_machine.py` and prints one line of JSON.

It runs as a separate process, so that neither its memory nor its threads stay with a rank, and as a file, so it imports
nothing of this package. Computation is timed by the CPU time of one thread, which depends little on other processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable

MEASURE_S = 0.15  # for each figure
TOKENS, FEATURES_IN, FEATURES_OUT = 512, 768, 640  # of a linear layer
ROUNDS, PAUSE_S = 3, 0.1  # for what is timed by wall-clock time: a busy moment passes
COPIED = 2**26  # bytes: more than caches hold
SENT = 2**22  # bytes
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NICENESS = 5  # beside a run that starts, its first step comes first
OTHER_S = 10.0  # timeout for the second rank


def best_s(work: Callable[[], object], clock: Callable[[], float], measure_s: float = MEASURE_S) -> float:
    """The shortest of several runs of `work`, in seconds."""
    work()
    shortest, end, turns = float("inf"), time.perf_counter() + measure_s, 0
    while turns < 3 or time.perf_counter() < end:
        began = clock()
        work()
        shortest, turns = min(shortest, clock() - began), turns + 1
    return shortest


def core_flops(dtype: str) -> float:
    """Floating-point operations per second of one core in the three products of a linear layer: forward, and the
    gradients of its input and of its weight.

    They differ in which operand is transposed, and where a CPU has no units for bf16, by a factor of 20: torch then
    multiplies two matrices of which none is transposed column by column, worst of all with rows of 2,048 bytes.
    """
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    kind = getattr(torch, dtype)
    x, weight = torch.randn(TOKENS, FEATURES_IN).to(kind), torch.randn(FEATURES_OUT, FEATURES_IN).to(kind)
    gradient = torch.randn(TOKENS, FEATURES_OUT).to(kind)
    products = (lambda: F.linear(x, weight), lambda: gradient @ weight, lambda: gradient.t() @ x)
    took_s = sum(best_s(product, time.thread_time) for product in products)
    return len(products) * 2 * TOKENS * FEATURES_IN * FEATURES_OUT / took_s


def attention_flops() -> float:
    """Floating-point operations per second of one core in causal attention; only the lower triangle counts."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    heads, length, features = 4, 512, 64
    query, key, value = (torch.randn(1, heads, length, features) for _ in range(3))
    flops = 4 * heads * length**2 * features / 2
    return flops / best_s(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), time.thread_time)


def copied_bytes_per_s(threads: int) -> float:
    """Bytes read and written per second by `threads` threads together."""
    import torch

    torch.set_num_threads(threads)
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    shortest = float("inf")
    for _ in range(ROUNDS):
        shortest = min(shortest, best_s(lambda: target.copy_(source), time.perf_counter, MEASURE_S / ROUNDS))
        time.sleep(PAUSE_S)
    return 2 * COPIED / shortest


def layer_s() -> float:
    """Seconds of a transformer block's forward pass on tiny tensors: the overhead of Python and torch."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    hidden, heads = 16, 2
    weights = [torch.randn(hidden, hidden, requires_grad=True) for _ in range(7)]
    scale = torch.ones(hidden, requires_grad=True)
    turn = torch.randn(4, hidden // heads)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * turn + torch.cat((-second, first), -1) * turn

    def layer() -> torch.Tensor:
        x = torch.randn(1, 4, hidden)
        normed = norm(x)
        query, key, value = (F.linear(normed, w).view(1, 4, heads, -1).transpose(1, 2) for w in weights[:3])
        attended = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(1, 4, hidden), weights[3])
        normed = norm(x)
        return x + F.linear(F.silu(F.linear(normed, weights[4])) * F.linear(normed, weights[5]), weights[6])

    return best_s(layer, time.thread_time)


def between_ranks(rendezvous: str) -> tuple[float, float]:
    """Bytes per second that each of two ranks sends in an all-reduce, and seconds per message (gloo on loopback).

    `rendezvous`: path of a file that does not exist yet.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    child = os.fork()
    try:
        rank = int(child == 0)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=OTHER_S)
        )
        torch.set_num_threads(1)
        sizes = ((4, 20), (SENT, 5))  # bytes and repetitions, the same on both ranks
        times = [float("inf")] * len(sizes)
        for _ in range(ROUNDS):
            for place, (size, turns) in enumerate(sizes):
                numbers = torch.zeros(size // 4)
                for _ in range(turns):
                    began = time.perf_counter()
                    dist.all_reduce(numbers)
                    times[place] = min(times[place], time.perf_counter() - began)
            time.sleep(PAUSE_S)
    finally:
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    # ring: 2 (n - 1) / n of the tensor, in 2 (n - 1) messages (Patarasuk & Yuan 2009), n = 2
    return SENT / max(times[1] - times[0], 1e-9), times[0] / 2


def main(cores: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing of a run outlives it
    os.nice(NICENESS)
    with tempfile.TemporaryDirectory(prefix="megalite_") as folder:
        # before anything starts threads, which do not survive a fork
        sent, message_s = between_ranks(f"{folder}/rendezvous")
    flops = {"fp32": core_flops("float32"), "bf16": core_flops("bfloat16")}
    facts = {
        "core_flops": flops,
        "attention_flops": attention_flops(),
        "memory_bytes_per_s": copied_bytes_per_s(cores),
        "layer_s": layer_s(),
        "link_bytes_per_s": sent,
        "message_s": message_s,
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # gloo's threads may abort the interpreter at shutdown: launch/runtime/rank_process.py
