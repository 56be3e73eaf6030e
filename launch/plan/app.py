"""`megalite plan` and its sub-commands. `megalite plan CONFIG.yaml` is `megalite plan layouts CONFIG.yaml`. No torch
here."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from launch.plan.calibrate_command import calibrate
from launch.plan.layouts_command import layouts
from launch.plan.reliability_command import reliability
from launch.plan.schedule_command import schedule
from launch.plan.simulate_command import simulate_runs

DEFAULT = "layouts"


class _ConfigFirst(TyperGroup):
    """A first word that is no sub-command is a config, for the sub-command `layouts`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(
    cls=_ConfigFirst,
    help="What fits, how fast, how long until something breaks: predicted before a launch.\n\n"
    "`megalite plan CONFIG.yaml` is `megalite plan layouts CONFIG.yaml`: its options are in `megalite plan layouts "
    "--help`."
    "\n\nExample: `megalite plan configs/quickstart.yaml --cluster configs/clusters/8_h100.yaml`",
    no_args_is_help=True,
)
plan_app.command(DEFAULT)(layouts)
plan_app.command("calibrate")(calibrate)
plan_app.command("reliability")(reliability)
plan_app.command("simulate")(simulate_runs)
plan_app.command("schedule")(schedule)
