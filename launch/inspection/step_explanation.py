"""Why a step took as long as it did: the parts of its pipeline, the prediction beside it, and what would help most.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from launch.errors import LaunchError
from launch.inspection.run_files import RECEIPT, Receipt, RunFiles
from launch.inspection.timelines import KeptStep
from launch.output import Table
from launch.planning.report.waterfall_figure import REMEDIES
from megalite.checkpoint.manifest import printable
from megalite.config import Config
from megalite.config.auto import PIPELINE, SCHEDULE
from megalite.config.rules.pipeline import problems_with_pipeline
from megalite.monitor.steps.message_pairs import whole_pipelines
from megalite.monitor.steps.parts import PARTS
from megalite.monitor.steps.pipeline_parts import PipelineParts, mean_parts, pipeline_parts, simulated_s
from megalite.monitor.steps.predicted_parts import PartPair, beside_prediction
from megalite.monitor.steps.timeline import Owner
from megalite.planner.search import CHUNKS
from megalite.schedules.tables import Schedule
from megalite.units import digits, percent, plural, seconds

WORTH = 0.01  # of a step, below which no remedy is
SHOWN = 0.005  # of a step, below which a part is among the rest
REST = "other"
AXES = ("tensor", "context", "expert")
LATE = 0.25  # of jitter, from which the passes of one rank explain it
REMEDIES_OF_PARTS = {  # measured parts that the planner does not predict: their name in a sentence, and what helps
    "data": ("waiting for data", "a faster disk, or a copy of the data on the host itself, would shrink it"),
    "evaluation": ("the evaluation", "a larger training.evaluation.interval, or fewer samples, would shrink it"),
    "self_check": ("the self-check", "a larger training.self_check_every would shrink it"),
    "checkpoint": ("the checkpoint", "checkpoint.background, or a larger checkpoint.interval, would shrink it"),
    "logging": ("logging", "a larger monitor.log_interval would shrink it"),
}


@dataclass(frozen=True)
class Loss:
    """The part of a step that costs most beyond the mathematics, and what makes it smaller."""

    part: str
    seconds: float
    remedy: str


class FasterSchedule(NamedTuple):
    """Another schedule for the same stages, whose simulated step is shorter."""

    name: str
    seconds: float
    own_s: float  # of the schedule that ran, simulated too


@dataclass(frozen=True)
class StepExplanation:
    """The reasons why a step took its time."""

    run_dir: Path
    step: int
    owner: Owner  # of the lowest rank: the layout
    pipeline: PipelineParts | None  # None: the model is not cut into stages, or a sentence says why it cannot be told
    faster: FasterSchedule | None  # that the config allows
    parts_s: Mapping[str, float]  # mean over ranks
    predicted_s: Mapping[str, float]  # by the planner's names; empty: there is no prediction
    problems: tuple[str, ...]  # sentences: what is lacking
    intervals: Mapping[str, int] = field(default_factory=dict)  # steps between two evaluations, self-checks, saves

    @property
    def wall_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def beside_prediction(self) -> list[PartPair]:
        return beside_prediction(self.predicted_s, self.parts_s)


def explain_step(run_dir: Path, kept: KeptStep) -> StepExplanation:
    """Reads the receipt of a run beside the timelines of a step, of those pipelines of which all stages have one.

    Raises LaunchError where there are none, OSError where the run's events cannot be read.
    """
    owner, problems = kept.aligned.first.owner, list(kept.problems)
    timelines = whole_pipelines(kept.aligned.timelines)
    if not timelines:
        raise LaunchError(
            f"step {kept.step} has no timelines of all stages of a pipeline, without which waiting for a neighbour "
            "cannot be told from transfer: monitor.timeline.ranks all keeps those of all ranks"
        )
    if left_out := len(kept.aligned.timelines) - len(timelines):
        problems.append(f"step {kept.step}: {plural(left_out, 'rank')} of pipelines that lack a stage left out")
    pipeline = None
    try:
        pipeline = pipeline_parts(timelines)
    except ValueError as error:
        problems.append(f"the pipeline is not taken apart: {error}")
    files = RunFiles.read(run_dir)
    problems += files.problems
    faster = None
    if pipeline is not None and files.config is not None:
        faster = _faster(pipeline, files.config, owner.data_parallel_size)
    predicted_s = _predicted(run_dir, files.receipt, owner, problems)
    return StepExplanation(
        *(run_dir, kept.step, owner, pipeline, faster, mean_parts(timelines), predicted_s, tuple(problems)),
        intervals=_intervals(files.config),
    )


def _intervals(config: Config | None) -> dict[str, int]:
    """Returns after how many steps those parts come again that not every step has."""
    if config is None:
        return {}
    training = config.training
    asked = {"evaluation": training.evaluation.interval, "self_check": training.self_check_every}
    return {part: every for part, every in asked.items() if every}


def _faster(pipeline: PipelineParts, config: Config, replicas: int) -> FasterSchedule | None:
    """Returns the schedule under which the measured stages would be noticeably faster, if there is one."""
    found, own_s = [], simulated_s(pipeline, Schedule(pipeline.schedule))
    for schedule in Schedule:
        tried = config.with_resolved({PIPELINE: len(pipeline.stages), SCHEDULE: schedule.value, CHUNKS: None})
        is_legal = not any(problems_with_pipeline(tried, replicas))
        if is_legal and (took_s := simulated_s(pipeline, schedule)) is not None:
            found.append((took_s, schedule.value))
    least_s, name = min(found, default=(math.inf, ""))
    return FasterSchedule(name, least_s, own_s) if own_s is not None and least_s < (1 - WORTH) * own_s else None


def _predicted(run_dir: Path, receipt: Receipt, owner: Owner, problems: list[str]) -> dict[str, float]:
    parts, why = receipt.prediction.parts_s, receipt.prediction.problem
    if not parts:
        problems.append(f"{run_dir / RECEIPT} has no predicted step time" + (f": {why}" if why else ""))
        return {}
    sizes = {name: size for name, size in vars(owner).items() if name.endswith("_parallel_size")}
    if any(receipt.layout.get(name) != size for name, size in sizes.items()):
        problems.append(f"{run_dir / RECEIPT} is of another layout than this step, and so is its prediction")
        return {}
    return {name: value for name, value in parts.items() if value is not None}


def largest_loss(found: StepExplanation) -> Loss | None:
    """Returns the loss for which a remedy would help most; None where nothing is worth one."""
    parts = found.parts_s
    losses = [
        *(Loss(f"{axis} collectives", parts[f"{axis}_collectives"], REMEDIES[f"{axis} collectives"]) for axis in AXES),
        Loss("the synchronisation of replicas", parts["gradient_sync"] + parts["weights_sync"], REMEDIES["replicas"]),
        Loss("the optimizer", parts["optimizer"], REMEDIES["optimizer"]),
        *_beside_the_passes(found),
        *(_of_pipeline(found.pipeline, found.faster) if found.pipeline is not None else ()),
    ]
    worst = max(losses, key=lambda loss: loss.seconds)
    return worst if worst.seconds > WORTH * found.wall_s else None


def _beside_the_passes(found: StepExplanation) -> Iterator[Loss]:
    """Yields what a step does beside its passes; each step's share of what comes every few steps, as an evaluation."""
    for part, (name, remedy) in REMEDIES_OF_PARTS.items():
        every = found.intervals.get(part, 1)
        shared = f"{name}, which {every:,} steps share" if every > 1 else name
        yield Loss(shared, found.parts_s[part] / every, remedy)


def _of_pipeline(pipeline: PipelineParts, faster: FasterSchedule | None) -> Iterator[Loss]:
    remedy = REMEDIES["pipeline bubble"]
    if faster is not None:
        remedy += (
            f"; without transfers and jitter these stages would take {seconds(faster.seconds)} with "
            f"parallel.pipeline_schedule {faster.name}, and take {seconds(faster.own_s)} with {pipeline.schedule}"
        )
    yield Loss("the schedule's own bubble", pipeline.bubble_s, remedy)
    stage, times = pipeline.slowest_stage.stage, pipeline.slowest_over_mean
    about_stage = f"stage {stage} takes {times:.2f} times as long as a mean one"
    yield Loss("stage imbalance", pipeline.imbalance_s, f"{about_stage}; {REMEDIES['stage imbalance']}")
    yield Loss("transfers between stages", pipeline.transfers_s, REMEDIES["between stages"])
    late, remedy = (
        pipeline.straggler,
        "equal passes did not take equally long: ranks that share no cores would shrink it",
    )
    if late.excess_s > LATE * pipeline.jitter_s:
        remedy = (
            f"the passes of rank {late.rank} on {printable(late.host)} took {seconds(late.excess_s)} longer than the "
            "medians of its stage, more than those of any other rank; look what else runs on that host"
        )
    yield Loss("jitter and stragglers", pipeline.jitter_s, remedy)


def sentences(found: StepExplanation) -> Iterator[str]:
    """Yields the parts as sums, and the idle time of a pipeline."""
    owner, pipeline, wall_s = found.owner, found.pipeline, found.wall_s
    schedule = f", {owner.schedule}" if owner.pipeline_parallel_size > 1 else ""
    batches = "1 micro-batch" if owner.micro_batches == 1 else f"{owner.micro_batches:,} micro-batches"
    yield f"step {found.step} of {printable(str(found.run_dir))}: {owner.sizes}{schedule}, {batches}, {seconds(wall_s)}"
    if pipeline is None:
        shown = {part: value for part, value in found.parts_s.items() if value >= SHOWN * wall_s and part != REST}
        if (rest_s := wall_s - sum(shown.values())) >= SHOWN * wall_s:
            shown[REST] = rest_s
        named = {PARTS[part]: value for part, value in shown.items()}
        yield f"step {seconds(wall_s)} = {_sum(named, wall_s)}"
        return
    yield f"span {seconds(pipeline.span_s)} = {_sum(pipeline.parts_s, pipeline.span_s)}"
    yield (
        f"idle share of the span: {percent(pipeline.idle_of_span)}; the schedule alone would have "
        f"{percent(pipeline.own_idle_of_span)}"
    )
    yield (
        f"idle time over working time: {percent(pipeline.idle_over_work)}; the schedule alone would have "
        f"{percent(pipeline.own_idle_over_work)}"
    )


def advice(found: StepExplanation) -> str:
    """Returns one sentence: the largest loss, and what would make it smaller."""
    loss = largest_loss(found)
    if loss is None:
        return "nothing in this step that could be spared took a hundredth of it"
    share = percent(loss.seconds / found.wall_s)
    return f"most would be gained from {loss.part}, {seconds(loss.seconds)} or {share} of the step: {loss.remedy}"


def stages_table(pipeline: PipelineParts, owner: Owner) -> Table:
    """Builds a table of the medians of each stage, of a micro-batch through all its chunks."""
    ranks = owner.tensor_parallel_size * owner.replicas
    rows = []
    for stage in pipeline.stages:
        weight = "" if stage.weight_gradient_s is None else seconds(stage.weight_gradient_s)
        rows.append((str(stage.stage), seconds(stage.forward_s), seconds(stage.backward_s), weight))
    columns = ("stage", "forward", "backward", "of it, weight gradient")
    return Table(columns, rows, f"one micro-batch, median of {plural(ranks, 'rank')} a stage", text_columns=())


def prediction_table(found: StepExplanation) -> Table:
    """Builds a table of the predicted parts beside the measured ones, with the sums below."""
    small_s, pairs = 0.0, []
    for pair in found.beside_prediction:
        if pair.predicted_s is None and found.predicted_s and pair.measured_s < SHOWN * found.wall_s:
            small_s += pair.measured_s
        else:
            pairs.append(pair)
    if small_s:
        pairs.append(PartPair("smaller parts", None, small_s))
    rows: list[tuple[str, ...] | None] = []
    for pair in pairs:
        rows.append(_row(pair))
        if pair.name == "waiting for a neighbour" and (pipeline := found.pipeline) is not None:
            simulated = {"pipeline bubble": pipeline.bubble_s, "stage imbalance": pipeline.imbalance_s}
            rows += [
                _row(PartPair(f"  of it, {name}", found.predicted_s.get(name), took_s))
                for name, took_s in simulated.items()
            ]
    predicted = [pair.predicted_s for pair in pairs if pair.predicted_s is not None]
    total = PartPair("step", sum(predicted) if predicted else None, found.wall_s)
    columns = ("part", "predicted", "measured", "measured over predicted")
    return Table(columns, [*rows, None, _row(total)], "mean over ranks")


def _row(pair: PartPair) -> tuple[str, ...]:
    name, predicted_s, measured_s = pair
    predicted = "" if predicted_s is None else seconds(predicted_s) if predicted_s else "0"
    return name, predicted, seconds(measured_s), digits(measured_s / predicted_s) if predicted_s else ""


def _sum(parts_s: Mapping[str, float], whole_s: float) -> str:
    """Returns the parts in percent, rounded so that they add up to 100."""
    ends = [round(100 * end_s / whole_s) for end_s in accumulate(parts_s.values(), initial=0.0)]
    shares = (end - begin for begin, end in pairwise(ends))
    return " + ".join(f"{name} {share} %" for name, share in zip(parts_s, shares, strict=True))


def as_json(found: StepExplanation) -> dict[str, Any]:
    """Returns the facts as plain values for `--json`."""
    pipeline, loss = found.pipeline, largest_loss(found)
    own = None
    if pipeline is not None:
        names = ("idle_of_span", "idle_over_work", "own_idle_of_span", "own_idle_over_work", "slowest_over_mean")
        own = asdict(pipeline) | {name: getattr(pipeline, name) for name in names}
        own["slowest_stage"] = pipeline.slowest_stage.stage
    return {
        "run_dir": str(found.run_dir),
        "step": found.step,
        "wall_s": found.wall_s,
        "parts_s": dict(found.parts_s),
        "pipeline": own,
        "faster_schedule": None if found.faster is None else found.faster._asdict(),
        "predicted_parts_s": dict(found.predicted_s),
        "beside_prediction": [pair._asdict() for pair in found.beside_prediction],
        "largest_loss": None if loss is None else asdict(loss),
        "problems": list(found.problems),
    }
