"""The planner beside what was published: every promise with its bound, every row with its error.

    python -m benchmarks.planner.validation            # writes the tables into docs/planner.md
    python -m benchmarks.planner.validation --check    # writes nothing; exit code 1 where they are no longer right

Either way the exit code is 1 where a bound is broken.

The published rows are benchmarks/published/*.csv, each with its provenance. One constant per accelerator is fitted, on
the tables named below; nothing else is.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from benchmarks.planner.bloom import LEAST_RANKED, groups
from benchmarks.planner.memory_published import bloom, figure_1, figure_7, zero_table_1
from benchmarks.planner.published import (
    Published,
    bloom_176b,
    experts_h100,
    held_out_a100,
    llama_3_405b,
    megatron_core_h100,
    mosaicml,
    mt_nlg,
    sc21_table_1,
    sc21_table_2,
    torchtitan,
)
from benchmarks.planner.scaling_tutorial import contradictions, scale_table
from benchmarks.planner.simulation import Check, Relation, validation_rows
from launch.planning.calibration import minimize
from megalite.planner.cost.step_time import step_time
from megalite.planner.failure_rates import rate_of_count
from megalite.planner.hardware import find_accelerator

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
BEGIN = "<!-- validation: made by `python -m benchmarks.planner.validation` -->\n"
END = "<!-- end of validation -->\n"


@dataclass(frozen=True)
class Promise:
    """A bound, and what was reached."""

    name: str
    reached: str
    bound: str
    holds: bool


@dataclass(frozen=True)
class ReportSection:
    """One heading of the page."""

    title: str
    text: str
    promises: tuple[Promise, ...]


def error_of(row: Published, efficiency: float) -> float:
    """Predicted over measured, minus one."""
    return step_time(row.job, row.cluster.with_figures(efficiency=efficiency)).seconds / row.seconds - 1


def fitted(rows: Sequence[Published]) -> float:
    """The efficiency for which the squared logarithms of predicted over measured are least, as `megalite plan
    calibrate` fits it."""

    def squares(logarithm: float) -> float:
        return sum(math.log(1 + error_of(row, math.exp(logarithm))) ** 2 for row in rows)

    return round(math.exp(minimize(squares, math.log(0.1), math.log(1.5))), 3)


@cache
def a100() -> float:
    """Fitted on SC21 Table 1 alone."""
    return fitted(list(sc21_table_1()))


@cache
def h100() -> float:
    """Fitted on MosaicML's table for the H100, which prints its micro-batches."""
    return fitted(mosaic_h100())


def mosaic_h100() -> list[Published]:
    """Also those of 128 and more GPUs."""
    return [row for row in mosaicml("mosaicml_fsdp_all", lambda row: "MosaicML H100") if _is_on(row, "H100")]


def mosaic_a100() -> list[Published]:
    """All lengths and sizes that MosaicML measured on A100s, 2048 tokens on 80 GB among them."""
    rows = mosaicml("mosaicml_fsdp_all", lambda row: f"MosaicML A100-{row['gpu'][5:7]}GB, all lengths")
    return [row for row in rows if _is_on(row, "A100")]


def _is_on(row: Published, accelerator: str) -> bool:
    return row.cluster.accelerator_name.startswith(accelerator)


def memory() -> ReportSection:
    """Part 1: exact where the paper is arithmetic."""
    exact, read_off, table_1, sweep = list(figure_1()), list(figure_7()), list(zero_table_1()), list(bloom())
    worst = [max(abs(figure.error) for figure in figures) for figures in (exact, read_off, table_1)]
    of_sweep = [figure.ours / figure.published - 1 for figure in sweep]
    promises = (
        Promise(f"Korthikanti figure 1, {len(exact)} values", f"{worst[0]:.0e} GiB", "1e-3", worst[0] <= 1e-3),
        Promise(f"Korthikanti figure 7, {len(read_off)} values", f"{worst[1]:.2f} points", "0.2", worst[1] <= 0.2),
        Promise(f"ZeRO table 1, {len(table_1)} values", f"{worst[2]:.1e} GB", "their digits", worst[2] <= 6e-4),
    )
    lines = ["| BLOOM, layout | printed GB | predicted GB | error |", "|---|--:|--:|--:|"]
    lines += [
        f"| {figure.name} | {figure.published:.0f} | {figure.ours:.1f} | {_signed(error)} |"
        for figure, error in zip(sweep, of_sweep, strict=True)
    ]
    text = [
        f"Of BLOOM's sweep, on which nothing is fitted, the mean error is {_percent(fmean(map(abs, of_sweep)))}.",
        "",
        *lines,
        "",
    ]
    return ReportSection("Memory", "\n".join(text), promises)


def step_times() -> ReportSection:
    """Part 2 of the planner: the constant of SC21 Table 1, held against all other A100 tables."""
    constant, held_out = a100(), held_out_a100()
    errors = [abs(error_of(row, constant)) for row in held_out]
    small = [row for row in sc21_table_1() if row.job.layout.world_size <= 256]
    large = [row for row in sc21_table_1() if row.job.layout.world_size > 256]
    from_small = fitted(small)
    far = [abs(error_of(row, from_small)) for row in large]
    largest = max(large, key=lambda row: row.job.layout.world_size)
    recorded = find_accelerator("A100-80GB").efficiency, find_accelerator("H100").efficiency
    promises = (
        Promise(
            "mean error of the held-out A100 tables", _percent(fmean(errors)), "at most 5.5 %", fmean(errors) <= 0.055
        ),
        Promise("largest error of a held-out row", _percent(max(errors)), "at most 15 %", max(errors) <= 0.15),
        Promise(
            "SC21, fitted on at most 256 GPUs: mean error on 512 to 3072",
            _percent(fmean(far)),
            "at most 3 %",
            fmean(far) <= 0.03,
        ),
        Promise(
            "SC21, fitted on at most 256 GPUs: error on 3072",
            _signed(error_of(largest, from_small)),
            "within 3 %",
            abs(error_of(largest, from_small)) <= 0.03,
        ),
        Promise(
            "constants in the catalogue are the fitted ones",
            f"{recorded[0]}, {recorded[1]}",
            f"{constant}, {h100()}",
            recorded == (constant, h100()),
        ),
    )
    text = [
        f"A100: efficiency {constant}, fitted on SC21 Table 1 alone and then frozen.",
        "",
        table(list(sc21_table_1()), constant),
        "Held out:",
        "",
        summary(held_out, constant),
        table(held_out, constant),
        "More rows than were promised, with the same constant (every length from 512 to 65,536 tokens, 8 to 128 GPUs; "
        "of attention's kernels only the middle of a published band is known):",
        "",
        summary([*mosaic_a100(), *bloom_176b()], constant),
        "Outside the model, shown and not tuned away: MT-NLG ran DeepSpeed's pipeline with the stalls of its day, "
        "ZeRO-3 of 2021 waited for its gathers.",
        "",
        table([*mt_nlg(), *(row for row in sc21_table_2() if "ZeRO" in row.table)], constant),
    ]
    return ReportSection("Step time on the A100", "\n".join(text), promises)


def step_times_h100() -> ReportSection:
    """The H100, where no bound was promised."""
    rows = [row for size in (1, 2, 4) for row in megatron_core_h100(size)]
    text = [
        f"H100: efficiency {h100()}, fitted on MosaicML's {len(mosaic_h100())} rows.",
        "",
        summary(mosaic_h100(), h100()),
        "Its attention is the first FlashAttention's, taken as fast beside the second as on the A100.",
        "",
        "Held out. Megatron-Core's table prints neither micro-batch nor interleaving (taken as one layer per chunk, as "
        "for Llama 3); with larger micro-batches it is met better, which proves nothing.",
        "",
        summary(rows, h100()),
        table([*llama_3_405b()], h100()),
        "Whether the operations of the row of 131,072 tokens count all scores is not printed: with them it would have "
        "measured 15.3 s.",
        "",
        "Experts that are dealt over ranks, with tokens forced to be balanced. Nothing is fitted: experts are whole on "
        "tensor-parallel ranks too, a token goes to a node once (DeepEP), attention is cuDNN's. Not in the model: that "
        "the rows of long sequences recompute experts, and how much slower products with few rows are.",
        "",
        summary([*experts_h100()], h100()),
        table([*experts_h100()], h100()),
        "Outside the model: torchtitan's H100s have HBM2e and are held to 500 W, and its selective recomputation does "
        "every other product again.",
        "",
        table(list(torchtitan()), h100()),
    ]
    return ReportSection("Step time on the H100", "\n".join(text), ())


def layouts() -> ReportSection:
    """Part 3: BLOOM's topology sweep."""
    found = groups()
    ranked = [group for group in found if group.runs >= LEAST_RANKED]
    second = [group for group in ranked if group.day == "02-21"]
    regret, spearman = max(group.regret for group in found), min(group.spearman for group in ranked)
    lines = [
        "| group | runs | regret | Spearman | mean error of time | chosen | fastest |",
        "|---|--:|--:|--:|--:|---|---|",
    ]
    lines += [
        f"| {group.name} | {group.runs} | {_percent(group.regret)} | {group.spearman:.2f} | "
        f"{_percent(group.time_error)} | {group.chosen} | {group.fastest} |"
        for group in found
    ]
    text = [
        "How much longer than its launch a kernel is waited for (4 times) was chosen on the first day's groups. "
        "Runs of one model on as many nodes, of which the planner would have chosen one. That kernels were waited for "
        "is inferred: the chronicle says that runs hung without it. With 96 heads of 150 features at a hidden size of "
        "14400, attention's products do not fit tensor cores, which the planner does not know: those runs took 28 % "
        "longer than it says, all alike. Three or fewer runs are not ranked: two of them differ by less than 1 %.",
        "",
        *lines,
        "",
    ]
    promises = (
        Promise("BLOOM: largest regret of a chosen layout", _percent(regret), "at most 3 %", regret <= 0.03),
        Promise(
            "BLOOM: largest regret and least Spearman of the second day, on which nothing was chosen",
            f"{_percent(max(group.regret for group in second))}, {min(group.spearman for group in second):.2f}",
            "3 %, 0.6",
            all(group.regret <= 0.03 and group.spearman >= 0.6 for group in second),
        ),
        Promise(
            f"BLOOM: least Spearman of groups of {LEAST_RANKED} and more runs",
            f"{spearman:.2f}",
            "at least 0.6",
            spearman >= 0.6,
        ),
    )
    return ReportSection("Layouts: BLOOM's topology sweep", "\n".join(text), promises)


def simulations() -> ReportSection:
    """Part 5: simulators beside closed forms and published runs."""
    checks = validation_rows()
    held = [check for check in checks if check.relation is not Relation.SHOWN]
    promises = tuple(
        Promise(check.name, f"{check.ours:.4g}, reference {check.reference:.4g}", _bound(check), check.passes)
        for check in held
        if not check.name.startswith("bubble")
    )
    bubbles = [check for check in held if check.name.startswith("bubble")]
    exact = Promise(
        "bubbles of the simulated schedules", "equal", "their closed forms", all(check.passes for check in bubbles)
    )
    lines = ["| figure | simulated | reference | note |", "|---|--:|--:|---|"]
    lines += [f"| {check.name} | {check.ours:.4g} | {check.reference:.4g} | {check.note} |" for check in checks]
    return ReportSection("Simulation", "\n".join([*lines, ""]), (*promises, exact))


def _bound(check: Check) -> str:
    match check.relation:
        case Relation.RELATIVE:
            return f"within {check.bound:.3g} of it" if check.bound < 0.001 else f"within {100 * check.bound:.3g} %"
        case Relation.ABSOLUTE:
            return f"within {100 * check.bound:.3g} points"
        case _:
            return "at least"


def reliability() -> ReportSection:
    """Part 4: the worked example, to the printed digit."""
    lines = ["| GPUs | MTBF h | failures in 30 days | interval h |", "|--:|--:|--:|--:|"]
    lines += [
        f"| {row.gpus} | {row.mtbf_hours:.1f} | {row.failures:.1f} | {row.interval_hours:.1f} |"
        for row in scale_table()
    ]
    lines += ["", "What the text gets wrong:", "", *(f"- {sentence}" for sentence in contradictions())]
    rate = rate_of_count(419, 16384, 54)
    promises = (
        Promise(
            "Llama 3: 419 interruptions in 54 days on 2,048 nodes",
            f"{rate:.2f} per 1,000 node-days",
            "3.79",
            round(rate, 2) == 3.79,
        ),
    )
    return ReportSection('Reliability: the example "scaling to 1000 GPUs"', "\n".join([*lines, ""]), promises)


def table(rows: Iterable[Published], efficiency: float) -> str:
    """Every row with its error."""
    lines = ["| table | run | measured s | predicted s | error |", "|---|---|--:|--:|--:|"]
    for row in rows:
        error = error_of(row, efficiency)
        predicted = row.seconds * (1 + error)
        lines.append(f"| {row.table} | {row.name} | {row.seconds:.3g} | {predicted:.3g} | {_signed(error)} |")
    return "\n".join([*lines, ""])


def summary(rows: Sequence[Published], efficiency: float) -> str:
    """Every table with its mean and largest error."""
    lines = ["| table | rows | mean error | largest | bias |", "|---|--:|--:|--:|--:|"]
    names = list(dict.fromkeys(row.table for row in rows))
    groups = [(name, [row for row in rows if row.table == name]) for name in names]
    for name, group in [*groups, *([("all", list(rows))] if len(groups) > 1 else [])]:
        errors = [error_of(row, efficiency) for row in group]
        mean, largest = fmean(map(abs, errors)), max(errors, key=abs)
        lines.append(f"| {name} | {len(group)} | {_percent(mean)} | {_signed(largest)} | {_signed(fmean(errors))} |")
    return "\n".join([*lines, ""])


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def sections() -> list[ReportSection]:
    """The whole page."""
    return [memory(), step_times(), step_times_h100(), layouts(), reliability(), simulations()]


def tables(found: Sequence[ReportSection]) -> str:
    """As Markdown."""
    lines = ["", "| promise | reached | bound | |", "|---|---|---|---|"]
    for promise in (promise for section in found for promise in section.promises):
        mark = "holds" if promise.holds else "**broken**"
        lines.append(f"| {promise.name} | {promise.reached} | {promise.bound} | {mark} |")
    for section in found:
        lines += ["", f"### {section.title}", "", section.text.rstrip()]
    return "\n".join([*lines, "", ""])


def with_tables(page: str, text: str) -> str:
    """The page with what stands between the marks replaced."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + text + END + rest.partition(END)[2]


def main() -> int:
    """Exit code 1 where a bound is broken, or, with --check, the page is not what it would be made now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    found = sections()
    old = PAGE.read_text()
    new = with_tables(old, tables(found))
    problems = [
        f"broken: {promise.name}: {promise.reached}, bound {promise.bound}"
        for section in found
        for promise in section.promises
        if not promise.holds
    ]
    if not arguments.check:
        PAGE.write_text(new)
    elif new != old:
        problems.append(f"{PAGE} is not what this command makes now: run it without --check")
    held = sum(len(section.promises) for section in found) - len(problems)
    print("\n".join(problems) if problems else f"all {held} promises hold", file=sys.stderr if problems else sys.stdout)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
