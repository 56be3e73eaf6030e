"""Output of `megalite plan reliability`: tables, and values for JSON and CSV. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from data_pipeline.storage.paths import decimal_size
from launch.output import Table, print_csv, print_json
from launch.planning.prediction_by_size import SizedRun
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from megalite.planner.cost.checkpoints import Save, is_for_storage
from megalite.planner.failure_rates import (
    GPUS_PER_NODE,
    HOURS_PER_DAY,
    MISFITS,
    OBSERVATIONS,
    PUBLISHED_BAND,
    Components,
)
from megalite.planner.reliability.goodput_model import Reliability
from megalite.units import count, short


@dataclass(frozen=True)
class ReliabilityAnswer:
    """The job, and the source of each of its figures."""

    job: Reliability
    rate_source: str
    components: Components | None  # None: an observed rate
    size_source: str
    communication_source: str | None  # None: communication is not counted
    interval_source: str = "checkpoint.interval auto"
    price: float | None = None  # of an accelerator-hour
    remarks: tuple[str, ...] = ()  # sizes that are left out, and options that are not counted
    by: str | None = None  # a date by which the run should end


log = get_logger(__name__)
TUTORIAL = Path(__file__).with_name("scaling_tutorial.json")  # made by benchmarks/planner/scaling_tutorial.py
LOW, HIGH = PUBLISHED_BAND
MOST_DAYS = 1_000_000  # that a date may lie ahead
ROUNDED = ("_s", "_min", "mtbf_hours", "mtbf_hours_at_high_rate", "mtbf_hours_at_low_rate")  # ends of names of figures


def show(answer: ReliabilityAnswer, runs: Sequence[SizedRun]) -> None:
    """Prints assumptions, tables and notices."""
    say(*assumptions(answer), sep="\n")
    for table in _tables(answer, runs):
        table.print()
    if answer.by is not None:
        say(by_words(answer, runs))
    for notice in notices(answer, runs):
        log.info(notice)


def assumptions(answer: ReliabilityAnswer) -> list[str]:
    """The assumptions behind the tables, one per line."""
    job, storage = answer.job, answer.job.storage
    limit = storage.storage_bytes_per_s
    parameters = count(job.parameters).replace(" G", "B").replace(" ", "")
    writers = f"{storage.writers} writer{'s' * (storage.writers != 1)}"
    if not isinstance(storage.writers, int):
        writers = f"one writer per {storage.writers[:-1].replace('gpu', 'GPU')}"
    timing = (
        f"in the background, training waits only for a copy to the host at {storage.copy_bytes_per_s / 1e9:g} GB/s per "
        "GPU"
        if storage.background
        else "while training waits"
    )
    return [
        f"failures: {short(job.rate_per_1000_node_days)} per 1,000 node-days ({answer.rate_source}); "
        f"published: {LOW:g} to {HIGH:g}; a failure takes {job.detection_s / 60:g} min to notice and "
        f"{job.restart_s / 60:g} min to restart",
        f"checkpoint: {decimal_size(job.checkpoint_bytes)}, {parameters} parameters "
        f"({answer.size_source}) of {job.bytes_per_parameter:g} bytes; {writers} at "
        f"{storage.writer_bytes_per_s / 1e9:g} GB/s, "
        + (f"at most {limit / 1e9:g} GB/s together, " if limit else "no limit together, ")
        + timing,
    ]


def cheapest_by(answer: ReliabilityAnswer, runs: Sequence[SizedRun]) -> SizedRun | None:
    """The run with the fewest accelerator-hours of those that end by the date; None where none does."""
    assert answer.by is not None
    last = date.fromisoformat(answer.by)
    return min((run for run in runs if ends_on(run) <= last), key=lambda run: run.accelerator_hours, default=None)


def ends_on(run: SizedRun) -> date:
    """The day on which a run ends that begins today."""
    return date.today() + timedelta(days=min(math.ceil(run.days), MOST_DAYS))


def by_words(answer: ReliabilityAnswer, runs: Sequence[SizedRun]) -> str:
    """One sentence with the cheapest number of GPUs that ends by the date."""
    if (best := cheapest_by(answer, runs)) is None:
        return f"none of these numbers of GPUs ends by {answer.by}: the largest ends on {ends_on(runs[-1])}"
    cost = "" if answer.price is None else f", {best.accelerator_hours * answer.price:,.0f} for accelerators alone"
    return (
        f"cheapest that ends by {answer.by}: {best.scale.gpus:,} GPUs, {best.layout}, on {ends_on(best)} if it begins "
        f"today; {best.accelerator_hours:,.0f} accelerator-hours{cost}"
    )


def notices(answer: ReliabilityAnswer, runs: Sequence[SizedRun]) -> list[str]:
    """Caveats and advice printed below the tables."""
    job, largest = answer.job, runs[-1].scale
    sentences = [
        *answer.remarks,
        f"columns `at {LOW:g} to {HIGH:g}` (or `at {HIGH:g} to {LOW:g}`): the same figure over the published "
        "failures per 1,000 node-days",
        "published failures per 1,000 node-days: "
        + ", ".join(f"{one.system.replace(', ', ' ')} {one.rate_per_1000_node_days:.3g}" for one in OBSERVATIONS)
        + " (their sources: --json)",
        MISFITS,
    ]
    if answer.communication_source is None:
        sentences.append(
            "communication is not counted: give its share of a step with --communication-share, or --accelerator"
        )
    if job.gpus_per_node != GPUS_PER_NODE and answer.components is None:
        sentences.append(f"published rates are of nodes with {GPUS_PER_NODE} GPUs, not {job.gpus_per_node}")
    if not LOW <= job.rate_per_1000_node_days <= HIGH:
        sentences.append(
            f"{short(job.rate_per_1000_node_days)} failures per 1,000 node-days lie outside the published "
            f"{LOW:g} to {HIGH:g}"
        )
    save = Save(largest.save_blocked_s, largest.save_duration_s)
    if answer.interval_source.endswith(" auto") and is_for_storage(save, 3600 * largest.mtbf_hours):
        sentences.append(
            f"at {largest.gpus:,} GPUs storage sets the interval: a shorter one would lose less time, and write more "
            "than storage should bear"
        )
    sentences.append(
        f"for `checkpoint.interval: auto` on {largest.gpus:,} GPUs: "
        f"checkpoint.mean_hours_between_failures={short(largest.mtbf_hours).replace(',', '')}"
    )
    return sentences


def flat(run: SizedRun, price: float | None) -> dict[str, Any]:
    """One row of the CSV output; the names of columns carry the units."""
    row: dict[str, Any] = {}
    for name, value in vars(run.scale).items():
        row |= {f"{part}_hours": hours for part, hours in run.scale.hours.items()} if name == "hours" else {name: value}
    length, hours = run.length, run.accelerator_hours
    row |= {"days": run.days, "accelerator_hours": hours, "price": None if price is None else hours * price}
    row |= {"layout": run.layout or None, "step_s": None, "steps": None}
    return row if length is None else row | {"step_s": length.step_s, "steps": length.steps}


def as_values(answer: ReliabilityAnswer, runs: Sequence[SizedRun]) -> dict[str, Any]:
    """All values for `--json`."""
    assumed = asdict(answer.job) | {"checkpoint_bytes": answer.job.checkpoint_bytes}
    best = None if answer.by is None else cheapest_by(answer, runs)
    cheapest = None if best is None else flat(best, answer.price) | {"ends": ends_on(best).isoformat()}
    for name in ("communication_share", "days", "interval_s"):  # may differ from one number of GPUs to the next
        del assumed[name]
    return {
        "assumptions": assumed,
        "rate_from": answer.rate_source,
        "communication_from": answer.communication_source,
        "failures_per_node_hour": None if answer.components is None else answer.components.failures_per_hour(),
        "published_band": list(PUBLISHED_BAND),
        "observations": [asdict(row) for row in OBSERVATIONS],
        "interval_from": answer.interval_source,
        "scales": [flat(run, answer.price) for run in runs],
        "notices": notices(answer, runs),
    } | ({} if answer.by is None else {"by": answer.by, "cheapest": cheapest})


def _tables(answer: ReliabilityAnswer, runs: Sequence[SizedRun]) -> list[Table]:
    rows = []
    for run in runs:
        row = flat(run, answer.price)
        saves_a_day = HOURS_PER_DAY * 3600 / (row["interval_s"] + row["save_blocked_s"])
        row["written_tb"] = saves_a_day * answer.job.checkpoint_bytes / 1e12
        minutes = {"interval_min": row["interval_s"] / 60, "young_interval_min": row["young_interval_s"] / 60}
        percentages = {"goodput_percent_at_high_rate": 100 * row["goodput_at_high_rate"]}
        known = {name: value for name, value in (row | minutes).items() if value is not None}
        rounded = {name: short(value) for name, value in known.items() if name.endswith(ROUNDED)}
        rows.append(row | percentages | rounded)
    failures = {
        "GPUs": "{gpus:,}",
        "nodes": "{nodes:,}",
        "MTBF\nh": "{mtbf_hours}",
        f"at {HIGH:g} to {LOW:g}\nh": "{mtbf_hours_at_high_rate} to {mtbf_hours_at_low_rate}",
        "failures": "{expected_failures:,.1f}",
        f"at {LOW:g} to {HIGH:g}": "{expected_failures_at_low_rate:,.1f} to {expected_failures_at_high_rate:,.1f}",
        "probability\nper day": "{failure_probability_per_day:.1%}",
    }
    saves = {
        "GPUs": "{gpus:,}",
        "duration of a save\ns": "{save_duration_s}",
        "of which blocking\ns": "{save_blocked_s}",
        "interval\nmin": "{interval_min}",
        "first order (Young 1974)\nmin": "{young_interval_min}",
        "written a day\nTB": "{written_tb:,.1f}",
    }
    lost = [part for part in runs[0].scale.hours if part != "computation"]
    hours = {"GPUs": "{gpus:,}"} | {f"{part}\nh": f"{{{part}_hours:,.1f}}" for part in lost}
    goodput = {
        "GPUs": "{gpus:,}",
        "goodput": "{goodput:.1%}",
        f"at\n{HIGH:g} to {LOW:g}": "{goodput_percent_at_high_rate:.1f}-{goodput_at_low_rate:.1%}",
        "Meta's\nE[ETTR]": "{ettr_meta:.1%}",
    }
    is_same = len({run.days for run in runs}) == 1
    during = f"{runs[0].days:,.4g} days" if is_same else "the run"
    of_hours = f" of {runs[0].days * HOURS_PER_DAY:,.4g} h" if is_same else ""
    communication = f"; communication: {answer.communication_source}" if answer.communication_source else ""
    return [
        *_length_table(answer, runs),
        Table.of(rows, failures, f"failures in {during}", ()),
        Table.of(rows, saves, f"checkpoints, interval: {answer.interval_source}", ()),
        # two tables: one of nine columns would not fit on a terminal
        Table.of(rows, hours, f"hours lost{of_hours}{communication}", ()),
        Table.of(rows, goodput, "goodput", ()),
    ]


def _length_table(answer: ReliabilityAnswer, runs: Sequence[SizedRun]) -> list[Table]:
    """The length of the run and its price; empty if only days are known."""
    lengths = [run.length for run in runs if run.length is not None]
    if not lengths and answer.price is None:
        return []
    columns = {"GPUs": "{gpus:,}"}
    if lengths:
        columns |= {"layout": "{layout}", "s/step": "{step_s:.3g}", "steps": "{steps:,}"}
    if answer.by is not None:
        columns["ends"] = "{ends}"
    columns |= {"days": "{days}", "accelerator-hours": "{accelerator_hours:,.0f}"}
    if answer.price is not None:
        columns |= {f"price, {answer.price:g}\nan hour": "{price:,.0f}"}
    title = "length and price" if answer.price is not None else "length"
    text_columns = (1,) if lengths else ()
    return [
        Table.of(
            [flat(run, answer.price) | {"days": short(run.days), "ends": str(ends_on(run))} for run in runs],
            columns,
            f"{title}, saves and failures included",
            text_columns,
        )
    ]


def show_tutorial(*, as_json: bool, as_csv: bool) -> None:
    """Prints the worked example as published, and where it contradicts itself."""
    example = json.loads(TUTORIAL.read_text(encoding="utf-8"))
    if as_csv:
        print_csv(example["scales"])
        return
    if as_json:
        print_json(example)
        return
    say(
        'The worked example "Scaling to 1000 GPUs": Llama 3 70B, nodes of 8 GPUs, tensor parallelism 8, 30 days; node '
        f"MTTF {example['node_mttf_hours']:,.1f} h (GPU 50,000 h, network adapter 150,000 h, power supply 100,000 h)"
    )
    scales = {
        "GPUs": "{gpus}",
        "nodes": "{nodes}",
        "cluster MTBF h": "{mtbf_hours:.1f}",
        "failures in 30 days": "{failures:.1f}",
        "Young-Daly interval h (60 s write)": "{interval_hours:.1f}",
    }
    Table.of(example["scales"], scales, "failures", ()).print()
    seconds, hourly = example["checkpoint_write_s"], example["hourly_checkpoint_share"]
    say(
        "Checkpoint: 14 bytes per parameter (fp16 weights, three fp32 tensors) = "
        f"{example['checkpoint_bytes'] / 1e9:.1f} GB; one writer of 7 GB/s: {seconds:.1f} s; saved hourly: "
        f"{hourly:.2%} of the time"
    )
    losses = {
        "GPUs": "{gpus}",
        "communication h": "{communication_hours:.1f}",
        "checkpoints h": "{checkpoint_hours:.1f}",
        "ratio": "{ratio:.1f}",
    }
    Table.of(example["losses"], losses, "hours lost in 30 days", ()).print()
    steps = [row | {"communication_ms": 1000 * row["communication_s"]} for row in example["steps"]]
    columns = {"GPUs": "{gpus}", "communication ms": "{communication_ms:.1f}", "efficiency": "{efficiency:.1%}"}
    Table.of(steps, columns, "a step", ()).print()
    say("Exercises", *(f"- {each['question']}: {each['answer']}" for each in example["exercises"]), sep="\n")
    say("\nWhere the text contradicts its own numbers", *(f"- {one}" for one in example["contradictions"]), sep="\n")
