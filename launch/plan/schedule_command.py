"""`megalite plan schedule`: who is busy when in a pipeline, drawn as text. No torch here."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any

import typer

from launch.arguments import AsJson
from launch.errors import LaunchError
from launch.plan.output import console, print_csv, print_json, show_table
from megalite.planner.schedules import (
    PipelineTimes,
    Schedule,
    Timeline,
    bubble_closed_form,
    simulate_schedule,
)

WIDTH = 100
MOST_TASKS = 2_000_000  # some seconds


class Which(StrEnum):
    """Schedules by name, or each of them."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    ALL = "all"


def schedule(
    stages: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of one optimizer step.")] = 8,
    which: Annotated[Which, typer.Option("--schedule", help="Interleaved takes --chunks.")] = Which.ONE_F_ONE_B,
    chunks: Annotated[int | None, typer.Option(min=1, help="Pieces of the model on each stage, interleaved.")] = None,
    forward_ms: Annotated[
        str, typer.Option(help="Of one micro-batch on a stage; or one number for each stage.", metavar="MS[,MS...]")
    ] = "1",
    backward_ms: Annotated[str, typer.Option(help="The same, for both gradients.", metavar="MS[,MS...]")] = "2",
    weight_gradient_ms: Annotated[
        str | None, typer.Option(help="The part of it that zero-bubble puts off; default half.", metavar="MS[,MS...]")
    ] = None,
    between_stages_ms: Annotated[float, typer.Option(help="For one tensor from stage to stage.")] = 0.0,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a line per piece of work as CSV.")] = False,
) -> None:
    """Draw one optimizer step of a pipeline: what each stage does when, how long all takes, and how much is idle.

    Example: `megalite plan schedule --stages 4 --micro-batches 8 --schedule 1f1b`
    """
    if as_json and as_csv:
        raise LaunchError("--json and --csv are two ways to print the result: give one of them")
    pieces = 2 if chunks is None else chunks
    if chunks is not None and which not in (Which.INTERLEAVED, Which.ALL):
        raise LaunchError(f"--chunks {chunks} is for interleaving: leave it out, or add --schedule interleaved")
    if weight_gradient_ms is not None and which not in (Which.ZERO_BUBBLE, Which.ALL):
        raise LaunchError(
            f"--weight-gradient-ms {weight_gradient_ms} is for zero-bubble: leave it out, or add --schedule zero-bubble"
        )
    _check_size(stages, micro_batches, pieces)
    if not 0 <= between_stages_ms < math.inf:
        raise LaunchError(f"--between-stages-ms {between_stages_ms:g}: give milliseconds of at least 0, such as 0.5")
    backward_s = _seconds("--backward-ms", backward_ms, stages)
    times = PipelineTimes(
        _seconds("--forward-ms", forward_ms, stages),
        backward_s,
        between_stages_ms / 1000,
        None if weight_gradient_ms is None else _weight_gradient_s(weight_gradient_ms, backward_s),
    )
    if not any((*times.forward_s, *times.backward_s)):
        raise LaunchError("--forward-ms and --backward-ms are 0: a schedule needs work, so give one of them")
    asked = list(Schedule) if which is Which.ALL else [Schedule(which.value)]
    timelines = [
        simulate_schedule(each, times, micro_batches, pieces if each is Schedule.INTERLEAVED else 1) for each in asked
    ]
    if as_json:
        print_json([_values(timeline) for timeline in timelines])
    elif as_csv:
        print_csv([row for timeline in timelines for row in _rows(timeline)])
    else:
        _show(timelines)


def _check_size(stages: int, micro_batches: int, pieces: int) -> None:
    most = MOST_TASKS // (3 * pieces)  # stages times micro-batches
    if stages > most:
        raise LaunchError(f"--stages {stages} are too many to draw: take up to {most:,}")
    if stages * micro_batches > most:
        raise LaunchError(
            f"{stages} stages with {micro_batches} micro-batches are too many to draw: more of them repeat what fewer "
            f"show, so take --micro-batches {most // stages}" + (" or fewer" if most // stages > 1 else "")
        )


def _weight_gradient_s(words: str, backward_s: tuple[float, ...]) -> tuple[float, ...]:
    values = _seconds("--weight-gradient-ms", words, len(backward_s))
    if any(part > whole for part, whole in zip(values, backward_s, strict=True)):
        raise LaunchError(
            f"--weight-gradient-ms {words}: cannot be longer than the backward pass, of which it is a part: give at "
            f"most {1000 * min(backward_s):g}, or a longer --backward-ms"
        )
    return values


def _seconds(option: str, words: str, stages: int) -> tuple[float, ...]:
    try:
        values = tuple(float(word) / 1000 for word in words.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(0 <= value < math.inf for value in values):
        raise LaunchError(
            f"{option} {words}: give milliseconds of at least 0, such as 1.5, or one for each stage: 1,1,2"
        )
    if len(values) not in (1, stages):
        raise LaunchError(f"{option} {words}: {len(values)} numbers for {stages} stages: give one, or {stages}")
    return values * stages if len(values) == 1 else values


def _rows(timeline: Timeline) -> list[dict[str, Any]]:
    return [{"schedule": timeline.schedule.value, **work._asdict()} for work in timeline.work]


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


def _values(timeline: Timeline) -> dict[str, Any]:
    return {**_facts(timeline), "work": [work._asdict() for work in timeline.work]}


def _show(timelines: list[Timeline]) -> None:
    from megalite.planner.schedule_drawing import draw, legend

    to = console()
    for timeline in timelines:
        to.print(f"{timeline.schedule}: {legend(timeline)}")
        to.print("\n".join(draw(timeline, WIDTH)), end="\n\n")
    rows = []
    for timeline in timelines:
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
    show_table(
        "one optimizer step",
        ("schedule", "ms", "idle over\nworking time", "equal stages,\nclosed form", "in flight at most\nfirst, last"),
        rows,
        to=to,
    )
