"""The command `megalite plan schedule`: draws a pipeline schedule as text. No torch here."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

from typer import Option

from launch.cli.options import AsJson, CommandOptions, check_one_format, taking
from launch.errors import LaunchError
from launch.output import Table, print_csv, print_json
from launch.runtime.printing import say
from megalite.config import ConfigError
from megalite.config.rules.pipeline import FEWEST_CHUNKS, SPLITS_BACKWARD
from megalite.schedules.simulation import PipelineTimes, Timeline, bubble_closed_form, simulate_schedule
from megalite.schedules.tables import Schedule

WIDTH = 100
MOST_TASKS = 2_000_000  # take a few seconds
MOST_STAGES = 1000  # more than any model has layers


class ScheduleOptions(CommandOptions):
    """The pipeline and the times of its stages."""

    stages: int = Option(4, min=1, help="Pipeline-parallel size.")
    micro_batches: int = Option(8, min=1, help="Micro-batches of one optimizer step.")
    which: Literal["1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipev", "all"] = Option(
        "1f1b", "--schedule", help="Pipeline schedule; interleaved takes --chunks, zb-v and dualpipev have 2."
    )
    chunks: int | None = Option(None, min=1, help="Model chunks per stage of the interleaved schedule; default 2.")
    forward_ms: str = Option(
        "1", help="Forward time of a micro-batch on a stage, or one number for each stage.", metavar="MS[,MS...]"
    )
    backward_ms: str = Option("2", help="Backward time of a micro-batch, of both gradients.", metavar="MS[,MS...]")
    weight_gradient_ms: str | None = Option(
        None, help="Share of it that a split backward postpones; default half.", metavar="MS[,MS...]"
    )
    between_stages_ms: float = Option(0.0, help="Time to send one tensor to the next stage.")
    as_json: AsJson = False
    as_csv: bool = Option(False, "--csv", help="Print a line per forward or backward pass as CSV.")


@taking(ScheduleOptions)
def schedule(options: ScheduleOptions) -> None:
    """Draw one optimizer step of a pipeline: what each stage computes when, the total time, and the idle share.

    Example: `megalite plan schedule --stages 4 --micro-batches 8 --schedule 1f1b`
    """
    check_one_format(as_json=options.as_json, as_csv=options.as_csv)
    which, chunks, weight_gradient_ms = options.which, options.chunks, options.weight_gradient_ms
    pieces = FEWEST_CHUNKS[Schedule.INTERLEAVED.value] if chunks is None else chunks
    if chunks is not None and which not in ("interleaved", "all"):
        raise LaunchError(f"--chunks {chunks} is for interleaving: leave it out, or add --schedule interleaved")
    asked = list(Schedule) if which == "all" else [Schedule(which)]
    if weight_gradient_ms is not None and not any(each in SPLITS_BACKWARD for each in asked):
        raise LaunchError(
            f"--weight-gradient-ms {weight_gradient_ms} is for schedules that split backward: leave it out, or add "
            "--schedule zero-bubble, zb-v or dualpipev"
        )
    _check_size(options.stages, options.micro_batches, pieces)
    timelines, left_out = _simulate(asked, _times(options), options.micro_batches, pieces)
    if options.as_json:
        print_json([{**_facts(each), "work": [one._asdict() for one in each.work]} for each in timelines])
    elif options.as_csv:
        print_csv([{"schedule": each.schedule.value, **one._asdict()} for each in timelines for one in each.work])
    else:
        _show(timelines)
    for sentence in left_out:
        say(sentence, file=sys.stderr if options.as_json or options.as_csv else sys.stdout)  # programs read stdout


def _times(options: ScheduleOptions) -> PipelineTimes:
    stages, between_ms, weight_gradient_ms = options.stages, options.between_stages_ms, options.weight_gradient_ms
    if not 0 <= between_ms < math.inf:
        raise LaunchError(f"--between-stages-ms {between_ms:g}: give milliseconds of at least 0, such as 0.5")
    forward_s = _seconds("--forward-ms", options.forward_ms, stages)
    backward_s = _seconds("--backward-ms", options.backward_ms, stages)
    weight_s = None if weight_gradient_ms is None else _seconds("--weight-gradient-ms", weight_gradient_ms, stages)
    times = PipelineTimes(forward_s, backward_s, between_ms / 1000, weight_s)
    try:
        times.check()
    except ConfigError as error:
        raise LaunchError(f"--weight-gradient-ms {weight_gradient_ms}: {error}") from None
    if not any((*times.forward_s, *times.backward_s)):
        raise LaunchError("--forward-ms and --backward-ms are 0: a schedule needs work, so give one of them")
    return times


def _simulate(
    asked: list[Schedule], times: PipelineTimes, micro_batches: int, pieces: int
) -> tuple[list[Timeline], list[str]]:
    """Returns the schedules that go, and a sentence about each other one. Raises ConfigError where one alone is asked
    for and does not go."""
    timelines, left_out = [], []
    for each in asked:
        chunks = pieces if each is Schedule.INTERLEAVED else FEWEST_CHUNKS[each.value]
        try:
            timelines.append(simulate_schedule(each, times, micro_batches, chunks))
        except ConfigError as error:
            if len(asked) == 1:
                raise
            left_out.append(f"left out: {error}")
    return timelines, left_out


def _check_size(stages: int, micro_batches: int, pieces: int) -> None:
    most = MOST_TASKS // (3 * pieces)  # stages times micro-batches
    if stages > min(most, MOST_STAGES):
        raise LaunchError(f"--stages {stages} are too many to draw: take up to {min(most, MOST_STAGES):,}")
    if stages * micro_batches > most:
        raise LaunchError(
            f"{stages} stages with {micro_batches} micro-batches are too many to draw: more of them repeat what fewer "
            f"show, so take --micro-batches {most // stages}" + (" or fewer" if most // stages > 1 else "")
        )


def _seconds(option: str, text: str, stages: int) -> tuple[float, ...]:
    try:
        values = tuple(float(number) / 1000 for number in text.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(0 <= value < math.inf for value in values):
        raise LaunchError(
            f"{option} {text}: give milliseconds of at least 0, such as 1.5, or one for each stage: 1,1,2"
        )
    if len(values) not in (1, stages):
        raise LaunchError(f"{option} {text}: {len(values)} numbers for {stages} stages: give one, or {stages}")
    return values * stages if len(values) == 1 else values


def _facts(timeline: Timeline) -> dict[str, Any]:
    form = bubble_closed_form(timeline.schedule, timeline.stages, timeline.micro_batches, timeline.chunks)
    return {
        "schedule": timeline.schedule.value,
        "stages": timeline.stages,
        "micro_batches": timeline.micro_batches,
        "chunks": timeline.chunks,
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_fraction_of_equal_stages": form,
        "peak_in_flight": list(timeline.peak_in_flight),
        "busy_s": list(timeline.busy_s),
    }


def _show(timelines: list[Timeline]) -> None:
    from megalite.schedules.drawing import draw, legend

    rows = []
    for timeline in timelines:
        say(f"{timeline.schedule}: {legend(timeline)}", *draw(timeline, WIDTH), "", sep="\n")
        facts = _facts(timeline)
        held = [count / timeline.chunks for count in timeline.peak_in_flight]
        rows.append(
            (
                f"{timeline.schedule}" + (f", {timeline.chunks} chunks" if timeline.chunks > 1 else ""),
                f"{1000 * timeline.makespan_s:,.4g}",
                f"{timeline.bubble_fraction:.1%}",
                f"{facts['bubble_fraction_of_equal_stages']:.1%}",
                f"{held[0]:g}, {held[-1]:g}",
            )
        )
    Table(
        ("schedule", "ms", "idle over\nworking time", "equal stages,\nclosed form", "in flight at most\nfirst, last"),
        rows,
        "one optimizer step",
    ).print()
