"""What `megalite plan reliability` prints: tables for people, values for programs. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launch.plan.output import console, print_csv, print_json, show_table
from megalite.planner import reliability_tutorial as tutorial
from megalite.planner.reliability import Scale
from megalite.planner.reliability_rates import (
    GPUS_PER_NODE,
    HOURS_PER_DAY,
    MISFITS,
    OBSERVATIONS,
    PUBLISHED_BAND,
)

if TYPE_CHECKING:
    from launch.plan.reliability_command import Answer

LOW, HIGH = PUBLISHED_BAND


def show(answer: Answer, scales: Sequence[Scale]) -> None:
    """For people."""
    to = console()
    for line in assumptions(answer):
        to.print(line)
    _show_failures(answer, scales)
    _show_saves(answer, scales)
    _show_hours(answer, scales)
    _show_observations()
    for notice in notices(answer, scales):
        to.print(f"megalite: {notice}")


def assumptions(answer: Answer) -> list[str]:
    """What the tables rest on, one fact a line."""
    job, storage = answer.job, answer.job.storage
    limit = storage.storage_bytes_per_s
    parameters = _scaled(job.parameters).replace(" G", "B").replace(" ", "")
    who = f"{storage.writers} writer{'s' * (storage.writers != 1)}"
    if not isinstance(storage.writers, int):
        who = f"one writer per {storage.writers[:-1].replace('gpu', 'GPU')}"
    how = (
        f"in the background, training waits only for a copy to the host at {storage.copy_bytes_per_s / 1e9:g} GB/s per "
        "GPU"
        if storage.background
        else "while training waits"
    )
    return [
        f"failures: {job.rate_per_1000_node_days:.3g} per 1,000 node-days ({answer.rate_words}); "
        f"published: {LOW:g} to {HIGH:g}; a failure takes {job.detection_s / 60:g} min to notice and "
        f"{job.restart_s / 60:g} min to restart",
        f"checkpoint: {_scaled(job.checkpoint_bytes)}B, {parameters} parameters "
        f"({answer.size_words}) of {job.bytes_per_parameter:g} bytes; {who} at "
        f"{storage.writer_bytes_per_s / 1e9:g} GB/s, "
        + (f"at most {limit / 1e9:g} GB/s together, " if limit else "no limit together, ")
        + how,
    ]


def notices(answer: Answer, scales: Sequence[Scale]) -> list[str]:
    """What to know beside the tables, and what to do with them."""
    job, largest = answer.job, scales[-1]
    told = [
        f"columns `at {LOW:g} to {HIGH:g}` (or `at {HIGH:g} to {LOW:g}`): the same by the published failures per 1,000 "
        "node-days",
        MISFITS,
    ]
    if answer.communication_words is None:
        told.append(
            "communication is not counted: give its part of a step with --communication-share, or --accelerator"
        )
    if job.gpus_per_node != GPUS_PER_NODE and answer.components is None:
        told.append(f"published rates are of nodes with {GPUS_PER_NODE} GPUs, not {job.gpus_per_node}")
    if not LOW <= job.rate_per_1000_node_days <= HIGH:
        told.append(
            f"{job.rate_per_1000_node_days:.3g} failures per 1,000 node-days lie outside the published "
            f"{LOW:g} to {HIGH:g}"
        )
    if job.storage.background and largest.interval_s <= largest.save.duration_s:
        told.append(
            f"at {largest.gpus:,} GPUs a save begins as soon as the one before it is complete: storage sets the "
            "interval"
        )
    told.append(
        f"for `checkpoint.interval: auto` on {largest.gpus:,} GPUs: "
        f"checkpoint.mean_hours_between_failures={largest.mtbf_hours:.3g}"
    )
    return told


def flat(scale: Scale) -> dict[str, Any]:
    """One row, all numbers under names with their units."""
    return {
        "gpus": scale.gpus,
        "nodes": scale.nodes,
        "mtbf_hours": scale.mtbf_hours,
        "mtbf_hours_at_high_rate": scale.mtbf_hours_band[0],
        "mtbf_hours_at_low_rate": scale.mtbf_hours_band[1],
        "expected_failures": scale.expected_failures,
        "expected_failures_at_high_rate": scale.expected_failures_band[0],
        "expected_failures_at_low_rate": scale.expected_failures_band[1],
        "failure_probability_per_day": scale.failure_probability_per_day,
        "save_blocked_s": scale.save.blocked_s,
        "save_duration_s": scale.save.duration_s,
        "interval_s": scale.interval_s,
        "young_interval_s": scale.young_interval_s,
        **{f"{part}_hours": hours for part, hours in scale.hours.items()},
        "goodput": scale.goodput,
        "goodput_at_high_rate": scale.goodput_band[0],
        "goodput_at_low_rate": scale.goodput_band[1],
        "ettr_meta": scale.ettr_meta,
    }


def as_values(answer: Answer, scales: Sequence[Scale]) -> dict[str, Any]:
    """For JSON."""
    return {
        "assumptions": _assumed(answer),
        "rate_from": answer.rate_words,
        "communication_from": answer.communication_words,
        "failures_per_node_hour": None if answer.components is None else answer.components.failures_per_hour(),
        "published_band": list(PUBLISHED_BAND),
        "observations": [asdict(row) for row in OBSERVATIONS],
        "scales": [flat(scale) for scale in scales],
        "notices": notices(answer, scales),
    }


def _assumed(answer: Answer) -> dict[str, Any]:
    """Of all scales; the share of communication may differ from one to the next."""
    values = asdict(answer.job) | {"checkpoint_bytes": answer.job.checkpoint_bytes}
    del values["communication_share"]
    return values


def _show_failures(answer: Answer, scales: Sequence[Scale]) -> None:
    rows = []
    for scale in scales:
        worse, better = scale.mtbf_hours_band
        many, few = scale.expected_failures_band
        rows.append(
            (
                f"{scale.gpus:,}",
                f"{scale.nodes:,}",
                _figures(scale.mtbf_hours),
                f"{_figures(worse)} to {_figures(better)}",
                f"{scale.expected_failures:,.1f}",
                f"{few:,.1f} to {many:,.1f}",
                f"{scale.failure_probability_per_day:.1%}",
            )
        )
    _show(
        f"how often something breaks, in {answer.job.days:g} days",
        (
            "GPUs",
            "nodes",
            "MTBF\nh",
            f"at {HIGH:g} to {LOW:g}\nh",
            "failures",
            f"at {LOW:g} to {HIGH:g}",
            "fails within\na day",
        ),
        rows,
    )


def _show_saves(answer: Answer, scales: Sequence[Scale]) -> None:
    own = answer.job.interval_s is not None
    rows = []
    for scale in scales:
        times = (scale.save.duration_s, scale.save.blocked_s, scale.interval_s / 60, scale.young_interval_s / 60)
        rows.append((f"{scale.gpus:,}", *map(_figures, times)))
    _show(
        "how often to save" + (": as given" if own else ""),
        (
            "GPUs",
            "a save takes\ns",
            "and blocks\ns",
            f"interval{'' if own else ' (Daly 2006)'}\nmin",
            "first order (Young 1974)\nmin",
        ),
        rows,
    )


def _show_hours(answer: Answer, scales: Sequence[Scale]) -> None:
    """Two tables: of nine columns one would not fit on a terminal."""
    lost = [part for part in scales[0].hours if part != "computation"]
    _show(
        f"where {answer.job.days * HOURS_PER_DAY:,.4g} h go"
        + (f"; communication: {answer.communication_words}" if answer.communication_words else ""),
        ("GPUs", *(f"{part}\nh" for part in lost)),
        [(f"{scale.gpus:,}", *(f"{scale.hours[part]:,.1f}" for part in lost)) for scale in scales],
    )
    rows = []
    for scale in scales:
        worse, better = scale.goodput_band
        band = f"{100 * worse:.1f}-{better:.1%}"
        rows.append((f"{scale.gpus:,}", f"{scale.goodput:.1%}", band, f"{scale.ettr_meta:.1%}"))
    _show("what is left of them", ("GPUs", "goodput", f"at\n{HIGH:g} to {LOW:g}", "Meta's\nE[ETTR]"), rows)


def _show_observations() -> None:
    rows = [(row.system, f"{row.rate_per_1000_node_days:.2f}", row.reckoned, row.source) for row in OBSERVATIONS]
    _show("published failures", ("run or cluster", "per 1,000 node-days", "from", "source"), rows, names=(0, 2, 3))


def show_tutorial(*, as_json: bool, as_csv: bool) -> None:
    """The worked example: its tables and exercises as printed, and what contradicts them."""
    if as_csv:
        print_csv([asdict(row) for row in tutorial.scale_table()])
    elif as_json:
        print_json(_tutorial_values())
    else:
        _print_tutorial()


def _tutorial_values() -> dict[str, Any]:
    return {
        "node_mttf_hours": tutorial.COMPONENTS.mttf_hours,
        "checkpoint_bytes": tutorial.CHECKPOINT_BYTES,
        "checkpoint_write_s": tutorial.CHARGED_SAVE.duration_s,
        "hourly_checkpoint_share": tutorial.CHARGED_SAVE.duration_s / 3600,
        "scales": [asdict(row) for row in tutorial.scale_table()],
        "losses": [asdict(row) | {"ratio": row.ratio} for row in tutorial.loss_table()],
        "steps": [asdict(row) | {"efficiency": row.efficiency} for row in tutorial.sweep_table()],
        "exercises": [asdict(exercise) for exercise in tutorial.exercises()],
        "contradictions": list(tutorial.contradictions()),
    }


def _print_tutorial() -> None:
    to = console()
    to.print(
        'The worked example "Scaling to 1000 GPUs": Llama 3 70B, nodes of 8 GPUs, tensor parallelism 8, 30 days; node '
        f"MTTF {tutorial.COMPONENTS.mttf_hours:,.1f} h (GPU 50,000 h, network adapter 150,000 h, power supply "
        "100,000 h)",
        highlight=False,
    )
    _show(
        "failures",
        ("GPUs", "nodes", "cluster MTBF h", "failures in 30 days", "Young-Daly interval h (60 s write)"),
        [
            (str(row.gpus), str(row.nodes), f"{row.mtbf_hours:.1f}", f"{row.failures:.1f}", f"{row.interval_hours:.1f}")
            for row in tutorial.scale_table()
        ],
    )
    seconds = tutorial.CHARGED_SAVE.duration_s
    to.print(
        f"Checkpoint: 14 bytes per parameter (fp16 weights, three fp32 tensors) = "
        f"{tutorial.CHECKPOINT_BYTES / 1e9:.1f} GB; one writer of 7 GB/s: {seconds:.1f} s; saved hourly: "
        f"{seconds / 3600:.2%} of the time",
        highlight=False,
    )
    _show(
        "hours lost in 30 days",
        ("GPUs", "communication h", "checkpoints h", "ratio"),
        [
            (str(row.gpus), f"{row.communication_hours:.1f}", f"{row.checkpoint_hours:.1f}", f"{row.ratio:.1f}")
            for row in tutorial.loss_table()
        ],
    )
    _show(
        "a step",
        ("GPUs", "communication ms", "efficiency"),
        [
            (str(row.gpus), f"{row.communication_s * 1000:.1f}", f"{row.efficiency:.1%}")
            for row in tutorial.sweep_table()
        ],
    )
    to.print("Exercises")
    for exercise in tutorial.exercises():
        to.print(f"- {exercise.question}: {exercise.answer}")
    to.print("\nWhere the text contradicts its own numbers")
    for sentence in tutorial.contradictions():
        to.print(f"- {sentence}")


def _show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], names: tuple[int, ...] = ()) -> None:
    show_table(title, columns, rows, names=names)


def _figures(value: float) -> str:
    """Four figures at most, from 100 up none after the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _scaled(value: float) -> str:
    """`847.2 G`."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:,.1f} {letter}"
    return f"{value:.0f} "
