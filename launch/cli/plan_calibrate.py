"""The command `megalite plan calibrate`: fits the efficiency of an accelerator to finished runs. No torch here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import AsJson, check_one_format
from launch.errors import LaunchError
from launch.output import Table, print_csv, print_json
from launch.runtime.logs import get_logger
from megalite.units import seconds

if TYPE_CHECKING:
    from launch.planning.calibration import Fit

log = get_logger(__name__)
MOST_NAMED_RUNS = 3  # in `calibrated_on`
LEAST_MATRIX_PRODUCTS = 0.25  # share of a step, below which a fit of the constant says little


def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="Run folders (run_dir) of finished runs.", metavar="RUN...")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hardware catalogue to update; default: the one that predictions read."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written; write nothing.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the runs as CSV.")] = False,
) -> None:
    """Fit an accelerator's efficiency, the planner's one constant, to the step times of runs on it.

    Prints each run's measured step time and its prediction with the old and the new constant, and writes the new one
    to $XDG_CONFIG_HOME/megalite/hardware.yaml (~/.config/megalite/hardware.yaml), which later predictions and
    `megalite plan` read. Each kind of accelerator is fitted on its own runs. In an existing file, only the comments
    at the top are kept.

    Example: `megalite plan calibrate runs/quickstart`
    """
    from launch.planning.calibration import fit, read_run
    from launch.prediction.hardware_catalogue import add_to_user_file, user_file

    check_one_format(as_json=as_json, as_csv=as_csv)
    read, left_out = [], []
    for path in dict.fromkeys(runs):
        try:
            read.append(read_run(path))
        except LaunchError as error:
            left_out.append(str(error))
    if not read:
        others = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise LaunchError(f"no run to calibrate on: {left_out[0]}{others}")
    found = fit(read)
    fits = [one for one in found if one.in_products >= LEAST_MATRIX_PRODUCTS]
    left_out += [
        f"the constant of {one.accelerator} is about matrix products, and they are only {one.in_products:.0%} of the "
        "steps of these runs: calibrate on a larger model, or on larger micro-batches"
        for one in found
        if one.in_products < LEAST_MATRIX_PRODUCTS  # the constant would absorb whatever else is slow
    ]
    if not fits:
        raise LaunchError(left_out[-1])
    where = output or user_file()
    entries = _entries(fits, where)
    facts = _facts(fits)
    if not as_json and not as_csv:
        for each in facts:
            _print_fit(each)
    if not dry_run:
        add_to_user_file(entries, where)
    if as_json:
        written = None if dry_run else str(where)
        print_json({"fits": facts, "left_out": left_out, "entries": entries, "written": written})
    elif as_csv:
        print_csv([{"accelerator": one["accelerator"], **run} for one in facts for run in one["runs"]])
    else:
        log.info("dry run: nothing was written" if dry_run else f"wrote {where}")
    for sentence in left_out:
        log.warning(f"left out: {sentence}")


def _entries(fits: Sequence[Fit], where: Path) -> dict[str, dict[str, Any]]:
    """Entries for the catalogue: only the constant of an accelerator that it knows, else the whole description."""
    from launch.prediction.hardware_catalogue import known_hardware

    known = known_hardware(where)
    accelerators: dict[str, Any] = {}
    links: dict[str, Any] = {}
    for one in fits:
        names = [run.folder.name for run in one.runs]
        more = f" and {len(names) - MOST_NAMED_RUNS} more" if len(names) > MOST_NAMED_RUNS else ""
        plural = "s" * (len(names) > 1)
        source = f"run{plural} {', '.join(names[:MOST_NAMED_RUNS])}{more}, {time.strftime('%Y-%m-%d')}"
        constant = {"efficiency": one.efficiency, "calibrated_on": source}
        if one.accelerator in known.accelerators:
            accelerators[one.accelerator] = constant
            continue
        run = one.runs[0]
        accelerators[one.accelerator] = run.whole.model_dump(mode="json") | constant
        named = {run.whole.inter_node: run.cluster.inter_node, run.whole.intra_node: run.link}
        there = {name.lower() for name in known.links}
        links |= {name: link.model_dump(mode="json") for name, link in named.items() if name.lower() not in there}
    return {"accelerators": accelerators} | ({"links": links} if links else {})


def _facts(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    return [
        {
            "accelerator": one.accelerator,
            "efficiency_before": one.runs[0].whole.efficiency,
            "efficiency": one.efficiency,
            "matrix_products": round(one.in_products, 4),
            "runs": [
                {
                    "run": str(run.folder),
                    "layout": str(run.job.layout),
                    "steps": run.steps,
                    "measured_s": run.measured_s,
                    "predicted_before_s": (before := run.predicted_s(run.whole.efficiency)),
                    "error_before": before / run.measured_s - 1,
                    "predicted_s": (after := run.predicted_s(one.efficiency)),
                    "error": after / run.measured_s - 1,
                }
                for run in one.runs
            ],
        }
        for one in fits
    ]


def _print_fit(facts: dict[str, Any]) -> None:
    runs = facts["runs"]
    Table(
        ("run", "layout", "measured", "predicted before\n(relative to measured)", "predicted now\n(over measured)"),
        [
            (
                run["run"],
                run["layout"],
                seconds(run["measured_s"]),
                f"{seconds(run['predicted_before_s'])} ({run['error_before']:+.1%})",
                f"{seconds(run['predicted_s'])} ({run['error']:+.1%})",
            )
            for run in runs
        ],
        title=f"{facts['accelerator']}: efficiency {facts['efficiency_before']:.4g} -> {facts['efficiency']:.4g}",
        text_columns=(0, 1),
    ).print()
    mean, before = (sum(abs(run[name]) for run in runs) / len(runs) for name in ("error", "error_before"))
    log.info(f"mean error {mean:.1%}, before {before:.1%}")
