"""The command `megalite trace`; launch/inspection implements it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.storage.paths import decimal_size
from launch.cli.options import AsJson
from launch.errors import LaunchError
from launch.output import print_json, spinner
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from megalite.units import plural

log = get_logger(__name__)


def trace(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN_DIR")],
    step: Annotated[
        int | None, typer.Option(min=1, help="A kept step; default: the newest, with --why a usual one.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="All kept steps in a range.", metavar="A-B")] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Tell why the step took so long, beside the prediction; write no file.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write, *.json.gz; default: trace_step_N.json.gz in RUN_DIR."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what all ranks did in a step as one Chrome trace, for ui.perfetto.dev; or tell why it took so long.

    A run keeps the timelines of steps 10, 11, 100, 101, ... and of its last one, and of those that `monitor.timeline`
    names. In the trace each rank is a process, arrows lead from the send of a message to its reception, and events of
    the run are marks. --why splits the time of a pipeline into work, the schedule's own bubble, stage imbalance,
    transfers, and jitter and stragglers, of the newest step that no evaluation or save made long.

    Example: `megalite trace runs/quickstart --step 100`
    """
    from launch.inspection.history import RunHistory
    from launch.inspection.run_files import check_is_run
    from launch.inspection.timelines import check_kept, newest_step, steps_between, usual_step

    if step is not None and steps is not None:
        raise LaunchError(f"--step {step} and --steps {steps} are two ways to choose: give one of them")
    if why and (steps is not None or output is not None):
        given = f"--output {output}" if steps is None else f"--steps {steps}"
        raise LaunchError(f"--why is about one step and writes no file: leave out {given}")
    first, last = _range(steps) if steps is not None else (0, 0)
    check_is_run(run_dir)
    if step is not None:
        check_kept(run_dir, step)
    if steps is not None:
        chosen = steps_between(run_dir, first, last)
    elif step is not None:
        chosen = [step]
    else:
        chosen = [usual_step(RunHistory.read(run_dir)) if why else newest_step(run_dir)]
    if why:
        _explain(run_dir, chosen[0], as_json)
    else:
        _write(run_dir, chosen, output, as_json)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    are_numbers = all(number.isdecimal() and len(number) < 19 for number in (first, last))
    if not (are_numbers and 1 <= int(first) <= int(last)):
        raise LaunchError(f"--steps {text}: give the first and the last step, such as 10-100")
    return int(first), int(last)


def _explain(run_dir: Path, step: int, as_json: bool) -> None:
    from launch.inspection import step_explanation
    from launch.inspection.timelines import read_kept_step

    found = step_explanation.explain_step(run_dir, read_kept_step(run_dir, step))
    for sentence in found.problems:
        log.warning(sentence)
    if as_json:
        print_json(step_explanation.as_json(found))
        return
    say(*step_explanation.sentences(found), sep="\n")
    if found.pipeline is not None:
        step_explanation.stages_table(found.pipeline, found.owner).print()
    step_explanation.prediction_table(found).print()
    say(step_explanation.advice(found))


def _write(run_dir: Path, steps: list[int], output: Path | None, as_json: bool) -> None:
    from launch.inspection.trace import check_trace_path, trace_path, write_trace

    path = output if output is not None else trace_path(run_dir, steps)
    check_trace_path(path)
    with spinner(f"reading {plural(len(steps), 'step')} of {run_dir}"):
        written = write_trace(run_dir, steps, path)
    for sentence in written.problems:
        log.warning(sentence)
    if as_json:
        print_json(vars(written))
        return
    which = f"step {steps[0]}" if len(steps) == 1 else f"{plural(len(steps), 'step')}, {steps[0]} to {steps[-1]},"
    say(
        f"wrote {path}: {which} on {plural(written.ranks, 'rank')}, {plural(written.arrows, 'message')} between "
        f"stages, {decimal_size(written.size)}; open it in ui.perfetto.dev, which reads it on your machine"
    )
