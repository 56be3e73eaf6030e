"""Explains the result of a search in three lines, and what would help if nothing fits. No torch."""

from __future__ import annotations

from typing import Any

from megalite.config import Config
from megalite.config.auto import CHOOSABLE, SCHEDULE
from megalite.config.batch_stages import largest_shape
from megalite.config.suggestions import OptionPath, dotted
from megalite.planner.hardware import is_guess
from megalite.planner.layout_choice import ERROR, NOTICEABLE, ROOMY, doubts, hidden_by_zero_3_s
from megalite.planner.published_speed import beside_published
from megalite.planner.search import CHUNKS, Dropped, LayoutCandidate, SearchResult, search, smallest_that_fits
from megalite.units import about, gib, seconds

OF_THE_SEQUENCE = ("activations", "working", "logits")  # parts of a stage's memory that grow with its length
BACKGROUND, BUCKET = ("checkpoint", "background"), ("parallel", "gradient_bucket_size")
SMALL_BUCKET = 5_000_000  # numbers, whose collectives still take longer than their start
WORTH_TELLING = 1e-3  # of a step
NODE_COUNTS = sorted({*range(1, 17), *(2**n for n in range(4, 15)), *(3 * 2**n for n in range(2, 13))})


def explain(result: SearchResult) -> tuple[str, str, str]:
    """Explains what bounds the winner, why the next best loses, and what was dropped."""
    if result.best is None:
        return "nothing fits", "", _dropped(result)
    best, fullest = result.best, result.best.fullest
    where = f" (stage {fullest.stage})" if len(best.memory) > 1 else ""
    is_rough = is_guess(result.cluster.accelerator)
    step = f"roughly {about(best.time.seconds)}" if is_rough else seconds(best.time.seconds)
    winner = (
        f"{best.layout}: bound by {main_parts(best)} of {step} a step; memory "
        f"{fullest.total / result.cluster.memory_bytes:.0%} full{where}"
    )
    return winner, _next_best(result), _dropped(result)


def caveats(config: Config, result: SearchResult) -> list[str]:
    """Lists the assumptions behind the winner's numbers."""
    best, kind = result.best, result.cluster.accelerator
    said = [f"efficiency {kind.efficiency:g} of {result.cluster.accelerator_name}: {kind.calibrated_on}"]
    if best is not None and hidden_by_zero_3_s(best) > NOTICEABLE * best.time.seconds:
        others = [one for one in result.candidates if one.layout.zero_stage < 3]
        instead = (
            f"; the best without it: {others[0].layout}, {seconds(others[0].time.seconds)} a step" if others else ""
        )
        said.append(
            f"ZeRO-3 is taken to hide {seconds(best.time.hidden_s)} of exchanges behind computing; where it does not, "
            f"a step takes so much longer{instead}"
        )
    if config.precision.float8 != "none":
        peak = kind.peak_tflops.get("fp8")
        said.append(
            f"products in float8 are taken to reach the same part of their peak, {peak:,.0f} TFLOP/s, and memory to be "
            "that of 16 bits: no run was fitted to it"
            if peak
            else f"no peak in fp8 is known of {result.cluster.accelerator_name}: steps are timed as in 16 bits"
        )
    if config.training.stages:
        largest = largest_shape(config.training)
        said.append(
            f"memory and step times are those of {largest.global_batch_size:,} sequences of "
            f"{largest.sequence_length:,} tokens in micro-batches of {largest.micro_batch_size:,}, the largest of the "
            "run's stages; steps of others are taken to need time in proportion to their tokens"
        )
    if (schedule := config.parallel.pipeline_schedule) != "1f1b":
        said.append(f"parallel.pipeline_schedule {schedule} is stated, so layouts that cannot have it are left out")
    if kind.device == "cuda" and result.cluster.nodes > 1:
        said.append(
            "step times are a best case: switches and links are taken to be free of other traffic, and all nodes to be "
            "equally fast"
        )
    if kind.device == "cpu":
        said.append("memory includes some 300 MiB that a rank's process takes before training")
    if best is not None and best.fullest.total > ROOMY * result.cluster.memory_bytes:
        said.append("memory is nearly full, and predictions of it are good to some 6 %: try it before you rely on it")
    if best is not None:
        tflops = best.time.model_flops / best.time.seconds / best.layout.world_size / 1e12
        name = result.cluster.accelerator_name
        if (beside := beside_published(name, kind, config.precision, tflops, is_measured=False)) is not None:
            said.append(beside)
    return said


def why_nothing_fits(config: Config, result: SearchResult, free: frozenset[OptionPath]) -> str:
    """Returns one sentence: by how much nothing fits, and the nearest alternative that works."""
    cluster = result.cluster
    here = f"{cluster.accelerators} x {cluster.accelerator_name}"
    if not result.too_large:
        return f"no layout works on {here}: {result.dropped[0].reason}" if result.dropped else f"no layout for {here}"
    nearest = result.too_large[0]
    lacks = f"the model fits in no layout on {here}: the nearest, {nearest.layout}, lacks {_missing(nearest)}"
    return f"{lacks}: {_remedy(config, result, free)}"


def _remedy(config: Config, result: SearchResult, free: frozenset[OptionPath]) -> str:
    cluster = result.cluster
    if stated := sorted(CHOOSABLE - free - {SCHEDULE}):
        freed = search(config, cluster, allocator=result.allocator)
        if freed.best is not None:
            values = freed.best.options
            differing = [path for path in stated if getattr(getattr(config, path[0]), path[1]) != values[path]]
            return f"it fits with {', '.join(stated_option(path, values[path]) for path in differing)}"
    schedule, is_one_machine = config.parallel.pipeline_schedule, cluster.accelerator.device == "cpu"
    ways: tuple[tuple[bool, dict[OptionPath, Any], str], ...] = (
        # fewer layouts than 1F1B, which may hold more activations
        (schedule != "1f1b", {SCHEDULE: "1f1b", CHUNKS: None}, f"without parallel.pipeline_schedule {schedule} one"),
        (config.parallel.gradient_bucket_size > SMALL_BUCKET, {BUCKET: SMALL_BUCKET}, ""),
        # a copy of the state in the same memory
        (is_one_machine and config.checkpoint.background, {BACKGROUND: False}, ""),
    )
    for is_in_the_way, changes, said in ways:
        if is_in_the_way:
            best = search(config.with_resolved(changes), cluster, free=free, allocator=result.allocator).best
            if best is not None:
                return f"{said} fits: {best.layout}" if said else f"it fits with {stated_option(*changes.popitem())}"
    counts = [count for count in NODE_COUNTS if count > cluster.nodes]  # more ranks of one machine bring no memory
    larger = None if is_one_machine else smallest_that_fits(config, cluster, counts, free=free)
    if larger is not None:
        return f"it fits on {larger[0].accelerators} of them ({larger[1]})"
    nearest, missing = result.too_large[0].memory, result.too_large[0].missing_bytes
    assert nearest is not None and missing is not None
    name, size = max(nearest.parts.items(), key=lambda part: part[1])
    can_be_shorter = sum(nearest.parts.get(part, 0.0) for part in OF_THE_SEQUENCE) > missing
    shorter = f", or a training.sequence_length below {config.training.sequence_length}" * can_be_shorter
    what = "a machine" if is_one_machine else "accelerators"
    numbers = "ranks" if is_one_machine else f"them up to {NODE_COUNTS[-1] * cluster.accelerators_per_node}"
    return (
        f"no number of {numbers} helps (the largest part, {name}, needs {gib(size)}): use {what} with more memory or a "
        f"smaller model{shorter}"
    )


def stated_option(path: OptionPath, value: Any) -> str:
    """Returns an option with its value, as `recompute.mode [full, none]`."""
    text = f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value).lower()
    return f"{dotted(path)} {text}"


def main_parts(candidate: LayoutCandidate) -> str:
    """Returns the largest contributors to step time, in percent."""
    time = candidate.time
    parts = sorted(time.parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {size / time.seconds:.0%}" for name, size in parts if size > 0.005 * time.seconds)


def _next_best(result: SearchResult) -> str:
    if len(result.candidates) == 1:
        return "no other layout fits"
    best, other = result.candidates[:2]
    slower = other.time.seconds / best.time.seconds - 1
    if doubtful := doubts(other, result.cluster.memory_bytes):
        what = f"{-slower:.1%} faster" if slower < 0 else f"{slower:.1%} slower"
        return f"not taken, {other.layout}: {what} by prediction, but {' and '.join(doubtful)}"
    if abs(slower) < ERROR:
        return f"next best, {other.layout}: as fast, within the error of {ERROR:.1%}, and no simpler"
    losses = {
        name: other.time.parts.get(name, 0.0) - best.time.parts.get(name, 0.0)
        for name in best.time.parts.keys() | other.time.parts.keys()
    }
    name, loss = max(sorted(losses.items()), key=lambda item: item[1])
    gained, gain = min(sorted(losses.items()), key=lambda item: item[1])
    saved = f", saves {seconds(-gain)} of {gained}" if gain < -WORTH_TELLING * best.time.seconds else ""
    return f"next best, {other.layout}: {slower:.1%} slower; it loses {seconds(loss)} to {name}{saved}"


def _dropped(result: SearchResult) -> str:
    if not result.too_large:
        return "dropped: nothing, every legal layout fits"
    nearest = result.too_large[0]
    count = len(result.too_large)
    return (
        f"dropped: {count} that do{'es' * (count == 1)} not fit; the nearest, {nearest.layout}, lacks "
        f"{_missing(nearest)}"
    )


def _missing(dropped: Dropped) -> str:
    assert dropped.missing_bytes is not None and dropped.memory is not None
    where = f" on stage {dropped.memory.stage}" if dropped.layout.pipeline_parallel_size > 1 else " per accelerator"
    return f"{gib(dropped.missing_bytes)}{where} (it needs {gib(dropped.memory.total)})"
