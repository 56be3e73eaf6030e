"""Options that a run chooses for the layout it has: the pipeline schedule, and the format in which gradients travel
between replicas. Pure arithmetic, no torch: the same config and cluster give the same values.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from megalite.config import Config, resolve_layout
from megalite.config.auto import OPEN, SCHEDULE, WIRE
from megalite.config.rules.performance import loses_compiled_blocks
from megalite.config.suggestions import OptionPath, dotted
from megalite.planner.cost.memory import Device
from megalite.planner.hardware import Cluster
from megalite.planner.layout_choice import ERROR, NOTICEABLE
from megalite.planner.search import Check, LayoutCandidate, fastest_schedule, judged, room_for, under_each_schedule

# rms error of numbers rounded to bf16, in parts of their rms. A unit in the last place is 2^-7 of the power of two
# below a number, rounding errs by 1 / sqrt(12) of it, and of normal numbers these powers have 0.545 of the mean square
BF16_ROUNDING = 2**-7 / math.sqrt(12) * math.sqrt(0.545)
Choice = tuple[dict[OptionPath, Any], list[str]]
"""Values for the open options of a config, and sentences about them."""


def choose_open(
    config: Config, cluster: Cluster, check: Check | None = None, allocator: Device | None = None, former: Any = None
) -> Choice:
    """Chooses for one rank per accelerator of `cluster`; `former` is the schedule with which the run has trained in
    this layout, which it keeps."""
    found = under_each_schedule(config, cluster, check, allocator)
    if not found:  # the config is refused where it is used
        return without_choice(config, "none can be timed")
    options: dict[OptionPath, Any] = {}
    sentences = []
    if SCHEDULE in config.open_options:
        options[SCHEDULE], sentence = _schedule(found, former, cluster)
        is_compiled = loses_compiled_blocks(config.with_resolved({SCHEDULE: "zero-bubble"}), cluster.accelerator.device)
        sentences.append(sentence + "; those that split backward would have no compiled blocks" * is_compiled)
    if WIRE in config.open_options:
        options[WIRE], sentence = _wire(config.with_resolved(options), cluster)
        sentences.append(sentence)
    return options, sentences


def without_choice(config: Config, why: object) -> Choice:
    """Returns the simplest values, and why no others."""
    options = {path: OPEN[path] or config.precision.reduction_dtype for path in config.open_options}
    return options, [f"{', '.join(f'{dotted(path)}: {options[path]}' for path in sorted(options))}, because {why}"]


def summed_in_bf16(replicas: int) -> float:
    """Returns the rms error of a sum of so many replicas' gradients that travels in bf16 around a ring, in parts of the
    sum's rms, where gradients are independent: n addends are rounded, then n - 1 sums of 2, 3, ... n of them."""
    return BF16_ROUNDING * math.sqrt(1 + (replicas + 1) / 2 - 1 / replicas)


def _schedule(found: list[LayoutCandidate], former: Any, cluster: Cluster) -> tuple[str, str]:
    kept = [one for one in found if one.layout.pipeline_schedule == former]
    taken = kept[0] if kept else fastest_schedule(found, cluster)
    name, room = taken.layout.pipeline_schedule, room_for(found[0], cluster)
    if kept:
        beside = f"as in the newest checkpoint; {dotted(SCHEDULE)} names another"
    elif not any(one.time.parts["pipeline bubble"] for one in found):
        return name, f"schedule: {name}, as stages share cores, which none of {len(found)} schedules would leave idle"
    else:
        others = [f"{_idle(one)}{' but too large' * (one.fullest.total > room)}" for one in found if one is not taken]
        beside = ", ".join(others) + f"; none that fits saves {ERROR:.1%} of a step" * (taken is found[0])
    return name, f"schedule: {_idle(taken)} idle ({beside})"


def _idle(one: LayoutCandidate) -> str:
    """Returns a schedule with the part of its passes in which a stage waits for the pipeline to fill and to empty."""
    busy_s = one.job.micro_batches * fmean(stage.seconds for stage in one.time.stages)
    return f"{one.layout.pipeline_schedule} {1 - busy_s / (busy_s + one.time.parts['pipeline bubble']):.1%}"


def _wire(config: Config, cluster: Cluster) -> tuple[str, str]:
    """Returns bf16 where it saves what can be noticed of a step, which fp32 keeps waiting for the link."""
    layout = resolve_layout(config, cluster.accelerators, cluster.accelerator.device)
    former, replicas, option = config.precision.reduction_dtype, layout.replicas, dotted(WIRE)
    if former == "bf16" or config.precision.dtype != "bf16" or replicas == 1:
        return former, f"{option}: {former}, as nothing else would be faster"
    wide, narrow = (judged(config.with_resolved({WIRE: dtype}), layout, cluster).time for dtype in (former, "bf16"))
    saved = 1 - narrow.seconds / wide.seconds
    error = f"rounds sums of {replicas} replicas' gradients by {summed_in_bf16(replicas):.2%} (rms)"
    if saved < NOTICEABLE:
        return former, f"{option}: {former}; bf16 takes less than {NOTICEABLE:.0%} off a step, and {error}"
    return "bf16", f"{option}: bf16, which {error} and takes {saved:.1%} off a step that waits for the link in {former}"
