"""The commands `megalite data ...`, about prepared data and what a run reads of it."""

from __future__ import annotations

import typer

from launch.cli.data_audit import at, find, plan_data
from launch.cli.data_check import check
from launch.cli.data_fetch import fetch
from launch.cli.data_pack import pack

data_app = typer.Typer(
    help="Check, pack and fetch prepared data, plan what a run reads of it, and say what its steps have read.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
data_app.command("plan")(plan_data)
for command in (at, find, check, pack, fetch):
    data_app.command()(command)
