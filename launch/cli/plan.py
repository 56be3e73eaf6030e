"""The command `megalite plan` and its subcommands; without one it is `megalite plan layouts`. No torch here."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from launch.cli.plan_calibrate import calibrate
from launch.cli.plan_layouts import layouts
from launch.cli.plan_reliability import reliability
from launch.cli.plan_schedule import schedule
from launch.cli.plan_simulate import simulate_runs
from launch.cli.verbosity import VERBOSITY

DEFAULT = "layouts"


class _ConfigFirst(TyperGroup):
    """Takes a first argument that is no subcommand as the config of the subcommand `layouts`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        first = next((place for place, word in enumerate(args) if word not in VERBOSITY), len(args))
        if first < len(args) and args[first] not in self.commands and args[first] not in ("--help", "-h"):
            args = [*args[:first], DEFAULT, *args[first:]]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(
    cls=_ConfigFirst,
    help="Predict memory, speed and failures before a launch.\n\n"
    "`megalite plan CONFIG.yaml` means `megalite plan layouts CONFIG.yaml`; for its options see `megalite plan "
    "layouts --help`."
    "\n\nExample: `megalite plan configs/quickstart.yaml --cluster configs/clusters/8_h100.yaml`",
    no_args_is_help=True,
)
plan_app.command(DEFAULT)(layouts)
plan_app.command("calibrate")(calibrate)
plan_app.command("reliability")(reliability)
plan_app.command("simulate")(simulate_runs)
plan_app.command("schedule")(schedule)
