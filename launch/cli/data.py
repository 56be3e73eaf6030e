"""The commands `megalite data ...`, about prepared data and what a run reads of it."""

from __future__ import annotations

import typer

from launch.cli.data_check import check

data_app = typer.Typer(
    help="Check prepared data.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
data_app.command()(check)
