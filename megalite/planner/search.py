"""Searches the layouts in which a model can be trained on a cluster and ranks them. Pure arithmetic, no torch.

In: a config, a cluster, and which options of the layout are free. Out: the layouts that fit, the one to take first, and
what was dropped and why. What is legal is asked of the config itself (`resolve_layout`): no rule stands here twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Self

from megalite.config import Config, ConfigError, ResolvedLayout, resolve_layout
from megalite.config.auto import CHOOSABLE, CONTEXT, EXPERT, PIPELINE, PLACEHOLDERS, SCHEDULE
from megalite.config.rules.performance import loses_compiled_blocks
from megalite.config.suggestions import OptionPath
from megalite.planner.cost.memory import (
    CPU,
    CUDA,
    PROCESS_BYTES,
    Device,
    StageMemory,
    memory_of,
    memory_of_stages,
    with_process,
)
from megalite.planner.cost.step_time import StepTime, step_time
from megalite.planner.hardware import Cluster
from megalite.planner.layout_choice import ERROR, RECOMPUTE_MODES, ROOMY, first_choice, simplicity
from megalite.planner.workload import ParallelLayout, TrainingWorkload
from megalite.schedules.tables import Schedule
from megalite.units import gib

TENSOR, SEQUENCE = ("parallel", "tensor_parallel_size"), ("parallel", "sequence_parallel")
DATA, ZERO = ("parallel", "data_parallel_size"), ("parallel", "zero_stage")
CHUNKS = ("parallel", "pipeline_chunks")
MICRO_BATCH, RECOMPUTE = ("training", "micro_batch_size"), ("recompute", "mode")

ZERO_STAGES = (1, 2, 3)  # stage 0 is served by 1
MOST_SHARING = 32  # ranks to a sequence

Check = Callable[[Config, ResolvedLayout], None]
"""Raises ConfigError for a legal layout that must not be chosen all the same."""


@dataclass(frozen=True)
class Ranks:
    """The facts about a run's processes that rules depend on."""

    count: int
    per_node: int
    device: Literal["cpu", "cuda"]

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """Returns one rank per accelerator."""
        return cls(cluster.accelerators, cluster.accelerators_per_node, cluster.accelerator.device)


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that fits, with its predicted time and memory."""

    job: TrainingWorkload
    memory: tuple[StageMemory, ...]
    time: StepTime

    @property
    def layout(self) -> ParallelLayout:
        return self.job.layout

    @property
    def fullest(self) -> StageMemory:
        """The stage whose ranks need most memory."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def options(self) -> dict[OptionPath, Any]:
        first = self.job.first_micro_batch_size
        return options_of(self.layout) | ({MICRO_BATCH: first} if first is not None else {})

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole cluster."""
        return self.job.tokens_per_step / self.time.seconds


@dataclass(frozen=True)
class Dropped:
    """A layout that was not ranked."""

    layout: ParallelLayout
    reason: str
    missing_bytes: float | None = None  # per accelerator; None: a rule of the config refuses it
    memory: StageMemory | None = None  # the stage that lacks it


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    cluster: Cluster
    candidates: tuple[LayoutCandidate, ...]  # the one to take, then fastest first
    dropped: tuple[Dropped, ...]  # the nearest to fitting first, then those that a rule refuses
    allocator: Device | None = None  # that was searched with

    @property
    def best(self) -> LayoutCandidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def too_large(self) -> tuple[Dropped, ...]:
        """Layouts that do not fit, the nearest to fitting first."""
        return tuple(one for one in self.dropped if one.missing_bytes is not None)


def search(
    config: Config,
    cluster: Cluster,
    *,
    free: frozenset[OptionPath] = CHOOSABLE,
    check: Check | None = None,
    allocator: Device | None = None,
) -> SearchResult:
    """Searches all layouts on all accelerators of `cluster`; options that are not `free` stay as the config has them.

    A stated `parallel.pipeline_schedule` is never free: layouts that cannot have it are dropped; if it is `auto`, it is
    1F1B where no other is faster. Where recomputation is free, each stage recomputes only what it must, for more only
    costs time. Ranks share sequences, as few as suffice, only where nothing else fits, and tensor parallelism crosses
    nodes only where not even that does. `allocator` is that of CPU ranks, by
    default the one that `needs` assumes.
    """
    if cluster.accelerator.device == "cuda":  # a CPU's number formats are the business of the config's rules
        cluster.peak_flops(config.precision.dtype)
    found: list[LayoutCandidate] = []
    dropped: list[Dropped] = []
    ranks = Ranks.of(cluster)
    if any(stage.micro_batch_size is not None for stage in config.training.stages):
        free = free - {MICRO_BATCH}  # each stage states its own
    for cut, crosses in cuts(config, ranks, free):
        for tp, pp in sizes(cut, ranks, free, crosses=crosses):
            try:
                for chain in chains(cut, tp, pp, ranks, free - {CONTEXT}, check):
                    _try(chain, cluster, free, allocator, found, dropped)
            except ConfigError as error:
                dropped.append(Dropped(_layout(cut, tp, pp, ranks.count), str(error)))
        if found:
            break
    least_s = min((one.time.seconds for one in found), default=0.0) if SCHEDULE in config.open_options else 0.0
    for place, one in enumerate(found):
        if one.time.seconds - one.time.parts.get("pipeline bubble", 0.0) < least_s:  # it may become the fastest
            alike = under_each_schedule(config.with_resolved(one.options), cluster, check, allocator)
            found[place] = fastest_schedule(alike, cluster)
    # the simpler of two layouts comes first whose times are equal to six digits
    found.sort(key=lambda one: (float(f"{one.time.seconds:.6g}"), *simplicity(one.layout)))
    if found:
        chosen = first_choice(found, cluster.memory_bytes)
        found.remove(chosen)
        found.insert(0, chosen)

    def how_far(one: Dropped) -> tuple[Any, ...]:
        stages = one.layout.pipeline_parallel_size
        is_far = one.missing_bytes is None and not _has_stages_as_stated(config, stages, free)
        return one.missing_bytes is None, one.missing_bytes or 0.0, is_far, simplicity(one.layout)

    dropped.sort(key=how_far)
    return SearchResult(cluster, tuple(found), tuple(dropped), allocator)


def judged(
    config: Config, layout: ResolvedLayout, cluster: Cluster, allocator: Device | None = None
) -> LayoutCandidate:
    """Predicts one layout, whether it fits or not."""
    job = TrainingWorkload.of(config, layout)
    return LayoutCandidate(job, needs(job, cluster, allocator), step_time(job, cluster))


def under_each_schedule(
    config: Config, cluster: Cluster, check: Check | None = None, allocator: Device | None = None
) -> list[LayoutCandidate]:
    """Predicts the layout of a config under each schedule that is legal there, 1F1B first, but for those that would
    keep a GPU's blocks from being compiled."""
    found = []
    for schedule in Schedule:
        tried = config.with_resolved({SCHEDULE: schedule.value})
        with suppress(ConfigError):
            layout = _checked(tried, Ranks.of(cluster), check)
            if not loses_compiled_blocks(tried, cluster.accelerator.device):
                found.append(judged(tried, layout, cluster, allocator))
    return found


def fastest_schedule(found: Sequence[LayoutCandidate], cluster: Cluster) -> LayoutCandidate:
    """Returns the fastest of `under_each_schedule` that fits; 1F1B where none saves more than predictions are wrong
    by."""
    plain, room = found[0], room_for(found[0], cluster)
    best = min((one for one in found if one.fullest.total <= room), key=lambda one: one.time.seconds)
    return best if best.time.seconds < (1 - ERROR) * plain.time.seconds else plain


def room_for(plain: LayoutCandidate, cluster: Cluster) -> float:
    """Returns the bytes that another schedule than that of `plain` may need: some are left over, or as few as there."""
    return max(ROOMY * cluster.memory_bytes, plain.fullest.total)


def needs(
    job: TrainingWorkload, cluster: Cluster, allocator: Device | None = None, stages: Sequence[int] | None = None
) -> tuple[StageMemory, ...]:
    """Returns the memory of a job on the cluster's accelerators; of CPU ranks all that counts against their host.

    `allocator` is that of CPU ranks, by default malloc as `megalite train` sets it up. `stages` are those to judge of a
    job whose stages all recompute the same; None: all of any job.
    """

    def memory(device: Device) -> Sequence[StageMemory]:
        return memory_of(job, device) if stages is None else memory_of_stages(job, stages, device)

    if cluster.accelerator.device == "cuda":
        return tuple(memory(CUDA))
    if allocator is None:
        peak = cluster.accelerator.peak_tflops  # bf16 units would make bf16 faster
        allocator = replace(CPU, widens_bf16=peak.get("bf16", 0.0) <= peak.get("fp32", 0.0))
    return tuple(with_process(one, job, PROCESS_BYTES) for one in memory(allocator))


def fitted(
    job: TrainingWorkload, cluster: Cluster, free: frozenset[OptionPath], allocator: Device | None = None
) -> tuple[TrainingWorkload, tuple[StageMemory, ...]]:
    """Returns a job and its memory. Where recomputation is free, each stage has the fastest with which it fits and has
    memory to spare, or else with which it needs least. `allocator` as in `needs`.

    Under 1F1B an early stage holds more micro-batches than a late one, so it may have to recompute more.
    """
    if RECOMPUTE not in free:
        return job, needs(job, cluster, allocator)
    fastest, *others = RECOMPUTE_MODES
    memory = list(needs(job.with_recompute(fastest), cluster, allocator))
    modes, limit = [fastest] * len(memory), ROOMY * cluster.memory_bytes
    for mode in others:
        if not (too_large := [one.stage for one in memory if one.total > limit]):
            break
        for one in needs(job.with_recompute(mode), cluster, allocator, too_large):
            if memory[one.stage].total > one.total:
                modes[one.stage], memory[one.stage] = mode, one
    return job.with_recompute(modes[0] if len(set(modes)) == 1 else tuple(modes)), tuple(memory)


def options_of(layout: ParallelLayout) -> dict[OptionPath, Any]:
    """Returns a layout as options of a config, including the number of replicas."""
    return {
        TENSOR: layout.tensor_parallel_size,
        PIPELINE: layout.pipeline_parallel_size,
        SCHEDULE: layout.pipeline_schedule,
        CONTEXT: layout.context_parallel_size,
        EXPERT: layout.expert_parallel_size,
        DATA: layout.data_parallel_size,
        SEQUENCE: layout.sequence_parallel,
        ZERO: layout.zero_stage,
        MICRO_BATCH: layout.micro_batch_size,
        RECOMPUTE: layout.recompute,
    }


def cuts(config: Config, ranks: Ranks, free: frozenset[OptionPath]) -> Iterator[tuple[Config, bool]]:
    """Yields the config with each size of context parallelism, and whether tensor parallelism crosses nodes, in the
    order in which they are taken."""
    shared = [n for n in divisors(ranks.count) if n <= MOST_SHARING]
    for crosses in (False, True):
        for size in shared if CONTEXT in free else [config.parallel.context_parallel_size]:
            yield config.with_resolved({CONTEXT: size}), crosses


def sizes(config: Config, ranks: Ranks, free: frozenset[OptionPath], *, crosses: bool) -> Iterator[tuple[int, int]]:
    """Yields sizes of tensor and pipeline parallelism that use all accelerators, the first inside nodes or across
    them."""
    parallel = config.parallel
    world = ranks.count // parallel.context_parallel_size
    for tp in divisors(world) if TENSOR in free else (parallel.tensor_parallel_size,):
        is_inside = ranks.per_node % tp == 0
        if is_inside == crosses:
            continue
        stages = divisors(world // tp) if world % tp == 0 else (1,)
        for pp in stages if PIPELINE in free else (parallel.pipeline_parallel_size,):
            if parallel.data_parallel_size in ("auto", world // (tp * pp)) or not {TENSOR, PIPELINE} & free:
                yield tp, pp


def chains(
    config: Config, tp: int, pp: int, ranks: Ranks, free: frozenset[OptionPath], check: Check | None = None
) -> Iterator[list[TrainingWorkload]]:
    """Yields lists of jobs of one tensor- and pipeline-parallel size in which only the micro-batch grows.

    Raises ConfigError where the simplest of them breaks a rule.
    """
    simplest = _simplest(config, tp, pp, free)
    layout = _checked(simplest, ranks, check)
    replicas = layout.data_parallel_size
    stages = ZERO_STAGES if ZERO in free and layout.replicas > 1 else (simplest.parallel.zero_stage,)
    cuts = (False, True) if SEQUENCE in free and tp > 1 else (simplest.parallel.sequence_parallel,)
    size = simplest.training.micro_batch_size
    batches = divisors(simplest.training.global_batch_size // replicas) if MICRO_BATCH in free else (size,)
    experts = simplest.model.num_experts if EXPERT in free else None
    dealt = divisors(math.gcd(experts, layout.replicas)) if experts else (simplest.parallel.expert_parallel_size,)
    for stage, cut, over in product(stages, cuts, dealt):
        tried = simplest.with_resolved({ZERO: stage, SEQUENCE: cut, EXPERT: over})
        try:
            layout = _checked(tried, ranks, check)
        except ConfigError:
            continue
        legal = []
        for batch in batches:
            one = tried.with_resolved({MICRO_BATCH: batch})
            with suppress(ConfigError):
                known = layout if batch == size else _checked(one, ranks, check)
                legal.append(TrainingWorkload.of(one, known))
        yield legal


def first_legal(config: Config, ranks: Ranks, check: Check | None = None) -> tuple[Config, ResolvedLayout]:
    """Returns the config with the simplest legal layout, whatever memory it needs, in which nothing shares sequences
    unless the config says so. Raises ConfigError."""
    free, problem, is_far = config.unresolved_options, None, False
    for crosses in (False, True):
        for tp, pp in sizes(config, ranks, free, crosses=crosses):
            simplest = _simplest(config, tp, pp, free)
            try:
                return simplest, _checked(simplest, ranks, check)
            except ConfigError as error:
                if problem is None or (is_far and _has_stages_as_stated(config, pp, free)):
                    problem, is_far = error, not _has_stages_as_stated(config, pp, free)
    raise problem or ConfigError(
        f"no layout with parallel.data_parallel_size {config.parallel.data_parallel_size} has "
        f"{ranks.count} processes: set it to auto"
    )


def smallest_that_fits(
    config: Config, cluster: Cluster, node_counts: Iterable[int], *, free: frozenset[OptionPath]
) -> tuple[Cluster, ParallelLayout] | None:
    """Returns the first number of nodes on which a layout fits, and that layout."""
    for nodes in node_counts:
        larger = cluster.model_copy(update={"nodes": nodes})
        ranks = Ranks.of(larger)
        for cut, crosses in cuts(config, ranks, free):
            for tp, pp in sizes(cut, ranks, free, crosses=crosses):
                with suppress(ConfigError):
                    *_, most_sparing = chains(cut, tp, pp, ranks, free - {CONTEXT})
                    job, memory = fitted(most_sparing[0], larger, free)
                    if max(stage.total for stage in memory) <= larger.memory_bytes:
                        return larger, job.layout
    return None


def divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return (*small, *(number // n for n in reversed(small) if n * n != number))


def _simplest(config: Config, tp: int, pp: int, free: frozenset[OptionPath]) -> Config:
    """Returns the config with these sizes; remaining `auto` options take their most permissive values."""
    simplest = {path: PLACEHOLDERS[path] for path in (free - {SCHEDULE}) | config.unresolved_options}
    return config.with_resolved(simplest | {TENSOR: tp, PIPELINE: pp})


def _has_stages_as_stated(config: Config, pp: int, free: frozenset[OptionPath]) -> bool:
    """Returns whether a stated schedule or list of modes can go with so many stages; if not, no sentence about a layout
    with them tells what else is in the way."""
    modes = config.recompute.mode
    has_its_stages = RECOMPUTE in free or isinstance(modes, str) or len(modes) == pp
    return has_its_stages and (pp > 1 or config.parallel.pipeline_schedule == "1f1b")


def _checked(config: Config, ranks: Ranks, check: Check | None) -> ResolvedLayout:
    layout = resolve_layout(config, ranks.count, ranks.device)
    if check is not None:
        check(config, layout)
    return layout


def _try(
    chain: Sequence[TrainingWorkload],
    cluster: Cluster,
    free: frozenset[OptionPath],
    allocator: Device | None,
    found: list[LayoutCandidate],
    dropped: list[Dropped],
) -> None:
    """Collects all candidates that fit; of those that do not, keeps the nearest. A larger micro-batch may need less:
    the last gradients are added to none."""
    nearest: Dropped | None = None
    for simplest in chain:
        if nearest is not None and RECOMPUTE in free and _is_farther(simplest, nearest, cluster, allocator):
            continue
        job, memory = fitted(simplest, cluster, free, allocator)
        fullest = max(memory, key=lambda stage: stage.total)
        missing = fullest.total - cluster.memory_bytes
        if missing <= 0:
            found.append(LayoutCandidate(job, memory, step_time(job, cluster)))
        elif nearest is None or missing < (nearest.missing_bytes or 0.0):
            nearest = Dropped(job.layout, _lacks(job, fullest, missing, cluster), missing, fullest)
    dropped += [nearest] if nearest is not None else []


def _is_farther(job: TrainingWorkload, nearest: Dropped, cluster: Cluster, allocator: Device | None) -> bool:
    """Returns whether one stage alone, however it recomputes, lacks as much as `nearest`: most layouts that do not fit
    need not be judged on all their stages."""
    assert nearest.memory is not None and nearest.missing_bytes is not None
    stage = [nearest.memory.stage]
    totals = (needs(job.with_recompute(mode), cluster, allocator, stage)[0].total for mode in RECOMPUTE_MODES[::-1])
    return all(total - cluster.memory_bytes >= nearest.missing_bytes for total in totals)


def _lacks(job: TrainingWorkload, fullest: StageMemory, missing: float, cluster: Cluster) -> str:
    where = f"stage {fullest.stage}" if job.layout.pipeline_parallel_size > 1 else "each rank"
    name, size = max(fullest.parts.items(), key=lambda part: part[1])
    return (
        f"{where} needs {gib(fullest.total)} and an accelerator has {gib(cluster.memory_bytes)}: {gib(missing)} are "
        f"missing (the largest part, {name}, needs {gib(size)})"
    )


def _layout(config: Config, tp: int, pp: int, world_size: int) -> ParallelLayout:
    """Returns the layout of a config that breaks a rule, as far as it has one."""
    return ParallelLayout(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=max(1, world_size // (tp * pp * config.parallel.context_parallel_size)),
        context_parallel_size=config.parallel.context_parallel_size,
        micro_batch_size=config.training.micro_batch_size,
    )
