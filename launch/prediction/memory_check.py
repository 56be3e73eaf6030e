"""Compares the memory that a run is predicted to need with what its devices have, before any rank builds an engine.

In: a config, its layout and the memory of a device. Out: a forecast, a warning where it is nearly full, and a refusal
where the run cannot fit. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from launch.errors import LaunchError
from launch.prediction.auto_layout import known_good
from launch.prediction.prediction import Prediction
from megalite.config import Config, ResolvedLayout
from megalite.config.auto import CHOOSABLE
from megalite.config.deepspeed import has
from megalite.config.suggestions import dotted
from megalite.planner.cost.memory import PROCESS_BYTES, TENSORS, Device, StageMemory
from megalite.planner.explanation import BACKGROUND, BUCKET, SMALL_BUCKET, stated_option, why_nothing_fits
from megalite.planner.hardware import Cluster
from megalite.planner.search import SearchResult, search
from megalite.planner.workload import TrainingWorkload
from megalite.units import gib

NEARLY_FULL = 0.9  # of a device's memory
MARGIN = 0.2
"""Part of the prediction that is left out before a run is refused. Without the memory of a process before its model is
built, no prediction that was measured was too high by more than 23 % (benchmarks/results/planner_memory.md), so what
does fit is not refused."""

OFFLOADED = (("zero_optimization", "offload_optimizer"), ("zero_optimization", "offload_param"))


@dataclass(frozen=True)
class MemoryForecast:
    """The predicted memory of a run beside that of its devices."""

    stages: tuple[StageMemory, ...]  # of one rank of each stage: of its process on a CPU, of its GPU else
    needed: float  # bytes of the fullest GPU, or of all ranks of a host together
    least: float  # bytes that it needs even if the prediction is too high by all of `MARGIN`
    available: int  # bytes of that GPU or host
    owner: str  # of that memory, for sentences: `each GPU`, `the host`
    sharing: str  # by which ranks, for sentences: empty, or ` for its 8 ranks`
    is_certain: bool  # whether the planner knows all options that bear on memory
    allocator: Device

    @property
    def cannot_fit(self) -> bool:
        return self.is_certain and self.least > self.available

    @property
    def warning(self) -> str | None:
        """One sentence where more than `NEARLY_FULL` of the memory is needed; None where there is room."""
        if self.needed <= NEARLY_FULL * self.available:
            return None
        has = f"{gib(self.available)} that {self.owner} has{self.sharing}"
        share = f"{gib(self.needed)} of the {has} ({self.needed / self.available:.0%})"
        if self.needed > self.available:
            copy = " or checkpoint.background false" if self.allocator.kind == "cpu" else ""
            largest = [max(stage.parts, key=lambda part: stage.parts[part]) for stage in self.stages]
            bucket = f" or a smaller {dotted(BUCKET)}" if "communication buffers" in largest else ""
            remedy = f"a smaller training.micro_batch_size, recompute.mode full{bucket}{copy} needs less"
            return f"predicted memory: {share}, more than there is: the run may be killed for want of memory; {remedy}"
        return f"predicted memory: {share}: predictions are good to some {MARGIN / 2:.0%}, so it may not fit"

    def facts(self) -> dict[str, Any]:
        """Returns the forecast as JSON holds it."""
        return {
            "needed_bytes": round(self.needed),
            "available_bytes": self.available,
            "of": f"{self.owner}{self.sharing}",
            "warning": self.warning,
        }


def forecast_memory(
    config: Config, layout: ResolvedLayout, allocator: Device, available: int, ranks_per_host: int
) -> MemoryForecast | None:
    """Predicts the memory of each rank, with `available` bytes on each GPU, or on each host of CPU ranks; None where
    `deepspeed` offloads state, which the planner cannot count. `allocator` is that of a CPU rank, or `CUDA`."""
    if any(has(config.deepspeed, path) for path in OFFLOADED):
        return None
    on_cpu = allocator.kind == "cpu"
    stages = Prediction.of(config, layout, None, process_bytes=PROCESS_BYTES if on_cpu else 0, device=allocator).memory
    if on_cpu:
        # each stage has equally many ranks; of several hosts some may need more than this, and none is refused for it
        needed = ranks_per_host * sum(stage.total for stage in stages) / len(stages)
        least = needed - ranks_per_host * PROCESS_BYTES  # processes share the pages of libraries
    else:
        tensors = Prediction.of(config, layout, None, device=TENSORS).memory
        needed, least = (max(stage.total for stage in found) for found in (stages, tensors))
    return MemoryForecast(
        stages,
        needed,
        (1 - MARGIN) * least,
        available,
        "the host" if on_cpu else "each GPU",
        f" for its {ranks_per_host} ranks" * (on_cpu and ranks_per_host > 1),
        is_certain=not config.deepspeed,
        allocator=allocator,
    )


def refuse_what_cannot_fit(
    config: Config,
    layout: ResolvedLayout,
    forecast: MemoryForecast | None,
    machine: Callable[[], Cluster],
    ranks_per_host: int,
    host_bytes: int | None = None,
) -> None:
    """Raises LaunchError if the run cannot fit, with the nearest layout that does; also if a host's `host_bytes` do
    not hold what GPU ranks keep there. `machine` describes the accelerators; it is called for a refusal alone. Where
    the catalogue does not know them, the sentence names no other layout."""
    if forecast is None:
        return
    on_host = ranks_per_host * fmean(stage.on_host for stage in forecast.stages)
    if host_bytes is not None and forecast.is_certain and (1 - MARGIN) * on_host > host_bytes:
        needs = f"{ranks_per_host} ranks need {gib(on_host)} of this host's own memory, which has {gib(host_bytes)}"
        raise LaunchError(f"{needs}: offload less or use more hosts; --force starts it all the same")
    if not forecast.cannot_fit:
        return
    own = TrainingWorkload.of(config, layout).layout
    has = f"{forecast.owner} has {gib(forecast.available)}{forecast.sharing}"
    lacks = f"this layout, {own}, needs {gib(forecast.needed)} of memory, and {has}"
    remedy = _remedy(config, layout, forecast, machine, ranks_per_host)
    raise LaunchError(f"{lacks}: {remedy}; --force starts it all the same")


def _remedy(
    config: Config,
    layout: ResolvedLayout,
    forecast: MemoryForecast,
    machine: Callable[[], Cluster],
    ranks_per_host: int,
) -> str:
    try:
        cluster = machine()
    except (LaunchError, ValueError):
        return "cut it over more GPUs, raise parallel.zero_stage, or set recompute.mode full"
    on_cpu = cluster.accelerator.device == "cpu"
    memory_gib = forecast.available / (ranks_per_host if on_cpu else 1) / 2**30
    accelerator = cluster.accelerator.model_copy(update={"memory_gib": memory_gib})
    cluster = cluster.model_copy(update={"accelerator": accelerator})
    result = _search(config, cluster, forecast)
    ways = [_changes(config, result)]
    if config.parallel.gradient_bucket_size > SMALL_BUCKET:
        small = config.with_resolved({BUCKET: SMALL_BUCKET})
        alone = forecast_memory(small, layout, forecast.allocator, forecast.available, ranks_per_host)
        if alone is not None and alone.needed <= alone.available:
            ways.append([stated_option(BUCKET, SMALL_BUCKET)])
    if on_cpu and config.checkpoint.background:  # which keeps a copy of the state in the same memory
        saves_wait = config.with_resolved({BACKGROUND: False})
        alone = forecast_memory(saves_wait, layout, forecast.allocator, forecast.available, ranks_per_host)
        if alone is not None and alone.needed <= alone.available:
            ways.append([f"{dotted(BACKGROUND)} false"])
        elif not any(ways) and (changes := _changes(config, _search(saves_wait, cluster, forecast))):
            ways.append([*changes, f"{dotted(BACKGROUND)} false"])
    if not any(ways):
        return why_nothing_fits(config, result, CHOOSABLE)
    return f"it fits with {', or with '.join(', '.join(changes) for changes in ways if changes)}"


def _search(config: Config, cluster: Cluster, forecast: MemoryForecast) -> SearchResult:
    allocator = forecast.allocator if cluster.accelerator.device == "cpu" else None
    return search(config, cluster, check=known_good(cluster.accelerator.device), allocator=allocator)


def _changes(config: Config, result: SearchResult) -> list[str]:
    """Lists the options in which the best layout differs from the config; empty where nothing fits."""
    values = result.best.options if result.best is not None else {}
    return [
        stated_option(path, values[path])
        for path in sorted(CHOOSABLE & values.keys())
        if getattr(getattr(config, path[0]), path[1]) != values[path]
    ]
