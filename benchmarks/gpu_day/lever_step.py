"""One lever of the GPU day: a model's step with some options, timed, and then one more under the profiler.

`python -m benchmarks.gpu_day.lever_step CONFIG.yaml DEVICE DOCUMENT_LENGTH [OPTION=VALUE ...]` prints JSON. Options
that the config's rules, this GPU or these packages refuse, and memory that does not suffice, are told as `refused`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_day.profile_step import profile, set_environment, step_of, warm_up

if TYPE_CHECKING:
    from launch.prediction.prediction import Prediction
    from megalite.config import Config
    from megalite.engine.step_result import StepResult

TIMED_STEPS = {"cuda": 10, "cpu": 2}
KEPT = ("kernels", "launches", "host_syncs", "idle", "waiting_operators", "longest_kernels")  # of a profile
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `megalite train` has it on GPUs


def measure(path: Path, device: str, document_length: int, options: Sequence[str]) -> dict[str, Any]:
    """Returns speed, memory and counts of a step, or `refused`: the sentence."""
    import torch

    from megalite.config import ConfigError, load_config

    try:
        config = load_config(path, options)
        step = step_of(config, device, document_length)
        warm_up(step)
        step_s = timed(step, device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
        counted = profile(step, device)
    except ConfigError as error:
        return {"refused": str(error)}
    except torch.OutOfMemoryError as error:
        return {"refused": str(error).partition(" GPU ")[0]}  # the rest is who holds how much
    tokens = config.training.global_batch_size * config.training.sequence_length
    found = {"step_s": step_s, "tokens_per_second": tokens / step_s, "memory_peak_gib": peak}
    return found | _rates(config, device, step_s) | {name: counted[name] for name in KEPT if name in counted}


def timed(step: Callable[[], StepResult], device: str) -> float:
    """Returns the seconds of a step; as in a run, its loss is read when the next step has begun."""
    steps = TIMED_STEPS[device]
    _ = step().loss
    started, before = time.perf_counter(), None
    for number in range(steps):
        begun = step()
        if before is not None:
            print(f"step {number} of {steps}: loss {before.loss:.3f}", file=sys.stderr, flush=True)
        before = begun
    assert before is not None
    _ = before.loss
    return (time.perf_counter() - started) / steps


def _rates(config: Config, device: str, step_s: float) -> dict[str, Any]:
    """Counts as the planner does: what the mathematics needs, over the peak of the number format without float8."""
    prediction = _prediction(config, device)
    flops = None if prediction.step is None else prediction.step.model_flops
    return {
        "model_tflops": None if flops is None else flops / step_s / 1e12,
        "mfu": prediction.model_flops_utilization(step_s),
        "beside_published": prediction.beside_published(step_s),
    }


def _prediction(config: Config, device: str) -> Prediction:
    from launch.errors import LaunchError
    from launch.prediction.prediction import Prediction
    from launch.prediction.this_machine import UNMEASURED, describe_machine
    from megalite.config import ConfigError, resolve_layout

    machine, problem = None, ""
    try:
        machine = describe_machine(1, on_cpu=device == "cpu", limits=UNMEASURED)
    except (LaunchError, ConfigError) as error:  # a GPU that the catalogue lacks
        problem = str(error)
    return Prediction.of(config, resolve_layout(config, 1, "cuda" if device == "cuda" else "cpu"), machine, problem)


def main() -> int:
    """The command."""
    path, device, document_length, *options = sys.argv[1:]
    set_environment(device)
    if device == "cuda":
        os.environ.setdefault(*ALLOCATOR)
    print("\n" + json.dumps(measure(Path(path), device, int(document_length), options)), flush=True)
    os._exit(0)  # nothing is left to do, and process groups take their time


if __name__ == "__main__":
    sys.exit(main())
