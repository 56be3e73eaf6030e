"""The part `calibration`: the planner's one constant for this accelerator, from the trainings of the other parts.

A training's result holds its receipt and config, all that `megalite plan calibrate` reads of a run: so it can be fitted
where the runs themselves are gone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_day.context import CommandFailed
from benchmarks.gpu_day.training import SHAPES

if TYPE_CHECKING:
    from benchmarks.gpu_day.context import Context

Facts = dict[str, Any]


def run(context: Context) -> None:
    """The part: all trainings together, and each alone, so that how far one constant goes is seen."""
    folders = _run_folders(context)
    if not folders:
        context.item("all", lambda: _missing(context))
        return
    context.record["items"].clear()  # it takes seconds, and the trainings may be others now
    context.item("all", lambda: _fitted(context, list(folders.values())))
    for name, folder in folders.items():
        if len(folders) > 1:
            context.item(f"{name} alone", lambda folder=folder: _fitted(context, [folder]))  # type: ignore[misc]


def _missing(context: Context) -> Facts:
    raise LookupError(f"no training to calibrate on: run one of the parts {', '.join(SHAPES)} first")


def _run_folders(context: Context) -> dict[str, Path]:
    """A run's folder for each training that ended well, with what is needed of it."""
    folders = {}
    for part in SHAPES:
        found = context.store.current(part)
        training = (found or {}).get("items", {}).get("training", {})
        if not training.get("passed"):
            continue
        folder = context.fresh_folder(f"calibrate_{part}")
        folder.mkdir(parents=True)
        (folder / "receipt.json").write_text(json.dumps(training["receipt"]))
        (folder / "config.yaml").write_text(training["config"])
        folders[part] = folder
    return folders


def _fitted(context: Context, folders: list[Path]) -> Facts:
    """Returns what `megalite plan calibrate` would write, and its remaining error; changes no file."""
    options = ["--output", str(context.work / "hardware.yaml"), "--dry-run", "--json"]
    try:
        told = context.json_of("-m", "launch", "plan", "calibrate", *folders, *options)
    except CommandFailed as error:
        if not context.tiny:
            raise
        return {"problem": f"as it may be of steps that are nothing but overhead: {error}"}
    (fit,) = told["fits"]
    runs = [{**run, "run": Path(run["run"]).name.removeprefix("calibrate_")} for run in fit["runs"]]
    return {"fit": {**fit, "runs": runs}, "left_out": told["left_out"], "entries": told["entries"]}
