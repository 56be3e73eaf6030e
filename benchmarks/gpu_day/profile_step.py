"""One training step under torch's profiler: kernels, launches, waits of the host, idle time of the GPU.

The counts come from the trace that the profiler exports, whose categories are the same for all versions of torch.
Without a GPU the operators are counted that would wait for one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from data_pipeline.loader import TokenBatch
    from megalite.config import Config
    from megalite.engine.step_result import StepResult

WARM_UP_STEPS = 3
STEP = "one training step"
TOLD_KERNELS = 12
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
WAITING_OPERATORS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # and those that begin so
Event = Mapping[str, Any]


def counts(events: Iterable[Event]) -> dict[str, Any]:
    """Counts a trace's events of the step: those that began while it ran, and the kernels that it launched."""
    timed = [event for event in events if event.get("ph") == "X"]
    step = next(event for event in timed if event.get("cat") == "user_annotation" and event["name"] == STEP)
    begin, end = step["ts"], step["ts"] + step["dur"]
    inside = [event for event in timed if begin <= event["ts"] < end and event is not step]
    by_kind: dict[str, list[Event]] = {}
    for event in inside:
        by_kind.setdefault(str(event.get("cat")), []).append(event)
    kernels = by_kind.get("kernel", [])
    copies = by_kind.get("gpu_memcpy", [])
    calls = Counter(event["name"] for kind in ("cuda_runtime", "cuda_driver") for event in by_kind.get(kind, []))
    operators = Counter(event["name"] for event in by_kind.get("cpu_op", []))
    found: dict[str, Any] = {
        "wall_ms": step["dur"] / 1000,
        "operators": sum(operators.values()),
        "waiting_operators": {name: operators[name] for name in WAITING_OPERATORS if operators[name]},
    }
    if not kernels:
        return found
    busy = busy_us([*kernels, *copies, *by_kind.get("gpu_memset", [])])
    return found | {
        "kernels": len(kernels),
        "launches": sum(count for name, count in calls.items() if name.startswith(LAUNCHES)),
        "host_syncs": {name: calls[name] for name in WAITS if calls[name]},
        "copies": dict(Counter(event["name"] for event in copies)),
        "busy_ms": busy / 1000,
        "idle": 1 - busy / step["dur"],
        "longest_kernels": _longest(kernels, step["dur"]),
    }


def busy_us(events: Sequence[Event]) -> float:
    """Microseconds in which at least one of them runs; streams may overlap."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _longest(kernels: Sequence[Event], wall_us: float) -> list[dict[str, Any]]:
    taken: Counter[str] = Counter()
    for event in kernels:
        taken[event["name"]] += event["dur"]
    calls = Counter(event["name"] for event in kernels)
    return [
        {"kernel": name[:120], "calls": calls[name], "ms": round(us / 1000, 3), "part": round(us / wall_us, 4)}
        for name, us in taken.most_common(TOLD_KERNELS)
    ]


def step_of(config: Config, device: str, document_length: int = 0) -> Callable[[], StepResult]:
    """Builds the engine of one rank; returns a function that begins a step on random tokens.

    `document_length` is the mean of packed documents, which attention keeps apart; 0: each sequence is one.
    """
    import numpy as np

    from megalite.config import resolve_layout
    from megalite.engine.build import build_engine
    from megalite.engine.deepspeed.process_groups import start_distributed
    from megalite.planner.cost.stage_parameters import recompute_of_blocks
    from models.decoder import layers_of

    start_distributed(local_rank=0)
    layout = resolve_layout(config, 1, "cuda" if device == "cuda" else "cpu")
    engine = build_engine(layers_of(config, recompute_of_blocks(config, layout)), config, layout)
    draw = np.random.default_rng(0)
    return lambda: engine.train_step(random_batches(config, draw, document_length), 1e-4)


def random_batches(config: Config, draw: np.random.Generator, document_length: int) -> list[TokenBatch]:
    """Draws the micro-batches of a step, in the form in which a run's loader hands them on."""
    import numpy as np

    from data_pipeline.loader import IGNORED_TARGET, TokenBatch

    rows, length = config.training.global_batch_size, config.training.sequence_length
    tokens = draw.integers(0, config.model.vocab_size, (rows, length + 1))
    targets, positions = tokens[:, 1:].copy(), None
    if document_length:
        begins = draw.random((rows, length)) < 1 / document_length
        begins[:, 0] = True
        targets[:, :-1][begins[:, 1:]] = IGNORED_TARGET
        everywhere = np.broadcast_to(np.arange(length), (rows, length))
        positions = everywhere - np.maximum.accumulate(np.where(begins, everywhere, 0), axis=1)
    valid, each = int((targets != IGNORED_TARGET).sum()), config.training.micro_batch_size
    parts = [slice(first, first + each) for first in range(0, rows, each)]
    return [
        TokenBatch(
            tokens[part, :-1], targets[part], None if positions is None else positions[part], np.arange(each), valid
        )
        for part in parts
    ]


def warm_up(step: Callable[[], StepResult], steps: int = WARM_UP_STEPS) -> None:
    """Trains some steps that nobody watches."""
    for number in range(steps):
        print(f"step {number + 1} of {steps} to warm up: loss {step().loss:.3f}", file=sys.stderr, flush=True)


def profile(step: Callable[[], StepResult], device: str) -> dict[str, Any]:
    """Counts what one step does, whose loss is read at its end."""
    import torch
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as profiler

    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profiler(activities=activities) as profiled, record_function(STEP):
        _ = step().loss
        if on_gpu:  # so that what the step has launched lies inside; one wait more, which is taken off again
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        print(f"reading a trace of {path.stat().st_size / 1e6:.0f} MB", file=sys.stderr, flush=True)
        found = counts(json.loads(path.read_text())["traceEvents"])
    if "host_syncs" in found:
        found["host_syncs"]["cudaDeviceSynchronize"] = found["host_syncs"].get("cudaDeviceSynchronize", 1) - 1  # ours
    return found


def set_environment(device: str) -> None:
    """Makes this process the only rank, before torch is imported."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
