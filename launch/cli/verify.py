"""The command `megalite verify`; launch/parity implements it. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from launch.cli.options import AsJson, ConfigPath, Overrides
from launch.errors import INTERRUPTED_CODE, VERIFY_FAILED_CODE
from launch.output import console, print_json
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.trainer.start.run_config import load_run_config

log = get_logger(__name__)


def verify(
    config_path: ConfigPath,
    overrides: Overrides = None,
    layouts: Annotated[
        str, typer.Option(help='"auto", or layouts such as "tp=2,pp=2,accumulation=3;dp=2,zero=3".')
    ] = "auto",
    reference: Annotated[
        Literal["transformers", "self"], typer.Option(help="Reference: transformers, or our own serial model (self).")
    ] = "transformers",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each short training run.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Do not shrink a large model.")] = False,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="The config's own layout, with all micro-batches, stages of the run and sources."),
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights and batches; default: a random one.")] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a layout counts as hung; compiled, 300 more.")
    ] = 120.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run; start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify that every layout computes what `transformers` computes in one process, and diagnose those that do not.

    Compares losses, logits, every gradient, weight and moment, clipping and evaluation on this machine's ranks. Exit
    code 0 only if all layouts pass, 1 if one fails. The keys of a layout: tp, pp, dp, cp, cp_kind, zero,
    sequence_parallel, recompute, accumulation, schedule and chunks (of a pipeline), compile.

    Example: `megalite verify configs/quickstart.yaml --layouts "tp=2,pp=2,accumulation=4,schedule=zb-v;dp=2,zero=3"`
    """
    from launch.parity import report as reports
    from launch.parity.verify import make_plan
    from launch.parity.verify import verify as run
    from launch.trainer.start.checks import choose_layout

    config = load_run_config(config_path, overrides or [])
    if not config.unresolved_options:  # with the schedule that a run would have
        config = choose_layout(config)[0]
    plan = make_plan(
        config,
        layouts=layouts,
        reference=reference,
        steps=steps,
        full=full,
        seed=seed,
        timeout_s=timeout,
        deep=deep,
    )
    log_line = console(stderr=True).print
    log_line(reports.introduction(plan))
    if dry_run:
        log_line(f"dry run: {'; '.join(map(str, plan.layouts))}; nothing was started")
        if as_json:
            print_json(reports.plan_as_json(plan))
        return
    try:
        report = run(plan)
    except KeyboardInterrupt:
        log.warning("interrupted; no result")
        raise typer.Exit(INTERRUPTED_CODE) from None
    if as_json:
        print_json(reports.as_json(report))
    else:
        reports.table(report).print()
        say("\n".join(reports.conclusion(report)))
    if not report.passed:
        raise typer.Exit(VERIFY_FAILED_CODE)
