"""`megalite plan calibrate`: the constant of an accelerator from runs on it. No torch here."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.arguments import AsJson
from launch.errors import LaunchError
from launch.plan.output import print_csv, print_json, show_table
from megalite.planner.units import seconds

if TYPE_CHECKING:
    from launch.plan.calibration import Fit

NAMED = 3  # runs in `calibrated_on`
LITTLE = 0.25  # part of a step in matrix products, below which the constant says little


def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs (their run_dir).", metavar="RUN...")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Catalogue to write into; default: the one that predictions read."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written; write nothing.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the runs as CSV.")] = False,
) -> None:
    """Fit an accelerator's efficiency, the planner's one constant, to the step times of runs on it.

    Prints each run's measured and predicted step time with the constant before and after, and writes the new one into
    $XDG_CONFIG_HOME/megalite/hardware.yaml (~/.config/megalite/hardware.yaml), which later predictions and `megalite
    plan` read. Runs on different accelerators are fitted apart. Of a file that is there, only comments at its head
    stay.

    Example: `megalite plan calibrate runs/quickstart`
    """
    from launch.plan.calibration import fit, read_run
    from launch.plan.user_hardware import add_to_user_file, user_file

    if as_json and as_csv:
        raise LaunchError("--json and --csv are two ways to print the result: give one of them")
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
    fits = [one for one in found if one.in_products >= LITTLE]
    left_out += [_too_little(one) for one in found if one.in_products < LITTLE]
    if not fits:
        raise LaunchError(left_out[-1])
    where = output or user_file()
    entries = _entries(fits, where)
    facts = _facts(fits)
    if not as_json and not as_csv:
        _print(facts)
    if not dry_run:
        add_to_user_file(entries, where)
    if as_json:
        written = None if dry_run else str(where)
        print_json({"fits": facts, "left_out": left_out, "entries": entries, "written": written})
    elif as_csv:
        print_csv([{"accelerator": one["accelerator"], **run} for one in facts for run in one["runs"]])
    else:
        print("megalite: dry run: nothing was written" if dry_run else f"megalite: wrote {where}")
    for sentence in left_out:
        print(f"megalite: left out: {sentence}", file=sys.stderr)


def _too_little(one: Fit) -> str:
    """The constant would take the blame for whatever else is slow."""
    return (
        f"the constant of {one.accelerator} is about matrix products, and they are only {one.in_products:.0%} of the "
        "steps of these runs: calibrate on a larger model, or on larger micro-batches"
    )


def _entries(fits: Sequence[Fit], where: Path) -> dict[str, dict[str, Any]]:
    """What goes into the catalogue: the constant alone where the accelerator is known there, else all of it."""
    from launch.plan.user_hardware import known_hardware

    known = known_hardware(where)
    accelerators: dict[str, Any] = {}
    links: dict[str, Any] = {}
    for one in fits:
        names = [run.folder.name for run in one.runs]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        plural = "s" * (len(names) > 1)
        told = f"run{plural} {', '.join(names[:NAMED])}{more}, {time.strftime('%Y-%m-%d')}"
        constant = {"efficiency": one.efficiency, "calibrated_on": told}
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


def _print(fitted: Sequence[dict[str, Any]]) -> None:
    for facts in fitted:
        _show(facts)
        mean, before = (
            sum(abs(run[name]) for run in facts["runs"]) / len(facts["runs"]) for name in ("error", "error_before")
        )
        print(f"megalite: mean error {mean:.1%}, before {before:.1%}")


def _show(facts: dict[str, Any]) -> None:
    show_table(
        f"{facts['accelerator']}: efficiency {facts['efficiency_before']:.4g} -> {facts['efficiency']:.4g}",
        ("run", "layout", "measured", "before", "now"),
        [
            (
                run["run"],
                run["layout"],
                seconds(run["measured_s"]),
                f"{seconds(run['predicted_before_s'])} ({run['error_before']:+.1%})",
                f"{seconds(run['predicted_s'])} ({run['error']:+.1%})",
            )
            for run in facts["runs"]
        ],
        names=(0, 1),
    )
