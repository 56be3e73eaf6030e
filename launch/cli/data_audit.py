"""The commands `megalite data plan|at|find`; launch/inspection and data_pipeline/audit/contents.py implement them.

Exit codes: 0 done; 2 user error. No torch.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from launch.cli.options import AsJson, ConfigPath, Overrides
from launch.output import Table, print_json
from launch.runtime.printing import say

RunFolder = Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN_DIR")]


def plan_data(config_path: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print what a run is going to read: samples, tokens and epochs of each source, stage by stage, and what repeats.

    A run that has checkpoints goes on from the newest one. Exit code 2 if a source would be read more often than its
    max_epochs.

    Example: `megalite data plan configs/quickstart.yaml training.steps=1000`
    """
    from launch.inspection.data_plan import data_of, plan_table, planned_sources
    from launch.prediction.batch_stage_text import format_stage, stage_facts
    from launch.trainer.data.run_mix import check_epochs, notices_of
    from launch.trainer.start.resume import checkpoints_of
    from launch.trainer.start.run_config import load_run_config

    config = load_run_config(config_path, overrides or [])
    data = data_of(config, checkpoints_of(config))
    rows = list(planned_sources(data))
    notices = list(notices_of(data.config, data.samples, data.followed)) if config.data.sources else []
    if as_json:
        length = {"steps": data.config.total_steps, "samples": data.stop}
        stages = {"stages": [asdict(row) for row in rows], "batch_stages": stage_facts(data.config)}
        print_json({**length, **stages, "notices": notices})
    else:
        plan_table(rows, ", ".join(config.data.prefixes)).print()
        for stage in stage_facts(data.config):
            say(format_stage(stage))
        for notice in notices:
            say(notice)
    if config.data.sources:
        check_epochs(data.config, data.samples, data.followed)


def at(
    run_dir: RunFolder,
    step: Annotated[int, typer.Option(min=1, help="Number of the step, from 1; done, or to come.")],
    text: Annotated[bool, typer.Option("--text", help="Print the text of every sample, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a step of a run has read: source, epoch, documents and, with --text, the text of every sample.

    Example: `megalite data at runs/quickstart --step 100 --text`
    """
    from launch.inspection.data_audit import MEANINGS, AuditedRun

    run = AuditedRun.open(run_dir)
    samples = run.samples_of(step)
    contents = [(content, run.text_of(content.k) if text else None) for content in run.contents(samples)]
    if as_json:
        rows = [
            {
                "sample": content.k,
                "source": content.source or None,
                "epoch": content.epoch,
                "documents": [asdict(document) for document in content.documents],
                **({"text": written} if text else {}),
            }
            for content, written in contents
        ]
        print_json({"step": step, "when": samples.when, "samples": rows, "notice": run.notice})
        return
    say(f"step {step:,}: samples {samples.first:,} to {samples.stop - 1:,}, {MEANINGS[samples.when]}")
    lines = [
        [", ".join(map(str, content.documents)), content.source, f"{content.k:,}", f"{content.epoch:,}"]
        for content, _ in contents
    ]
    Table(["documents", "source", "sample", "epoch"], lines, text_columns=(0, 1)).print()
    for content, written in contents if text else ():
        say(f"--- sample {content.k:,}", written or "", sep="\n")
    if run.notice:
        say(run.notice)


def find(
    run_dir: RunFolder,
    document: Annotated[
        str,
        typer.Option(
            help="A source or a prefix, and the number of a document in it.", metavar="SOURCE_OR_PREFIX:NUMBER"
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Print the steps of a run, done and to come, that read a document, in all epochs; it scans nothing.

    Example: `megalite data find runs/quickstart --document runs/quickstart/data/python_stdlib:17`
    """
    from launch.inspection.data_audit import MEANINGS, AuditedRun

    run = AuditedRun.open(run_dir)
    readings = run.readings(document)
    if as_json:
        print_json(
            {
                "document": document,
                "samples": [asdict(reading) | {"source": reading.source or None} for reading in readings],
                "notice": run.notice,
            }
        )
        return
    if not readings:
        skipped = ", left out by data.too_long skip" if run.data.config.data.too_long == "skip" else ""
        say(f"no step of the run reads {document}: it is held out, empty{skipped}, or comes after the end of the run")
    lines = [
        [
            MEANINGS[reading.when],
            reading.source,
            "" if reading.step is None else f"{reading.step:,}",
            f"{reading.k:,}",
            f"{reading.epoch:,}",
        ]
        for reading in readings
    ]
    if lines:
        Table(["when", "source", "step", "sample", "epoch"], lines, text_columns=(0, 1)).print()
    if run.notice:
        say(run.notice)
