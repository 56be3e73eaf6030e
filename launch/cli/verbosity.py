"""The options --verbose and --quiet, which every command takes before or after its name."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.main import get_command

from launch.runtime.logs import configure_logging

VERBOSITY = ("--verbose", "-v", "--quiet", "-q")
LEVELS = {"verbose": "DEBUG", "quiet": "WARNING"}


def _set_level(context: typer.Context, option: typer.CallbackParam, is_given: bool) -> None:
    """Sets the level of messages for this command and the processes that it starts. Raises LaunchError for both."""
    name = option.name or ""
    if not is_given or context.resilient_parsing:
        return
    if context.meta.setdefault("verbosity", name) != name:
        from launch.errors import LaunchError

        raise LaunchError("--verbose and --quiet contradict each other: give one of them")
    configure_logging(LEVELS[name])


_OPTIONS = typer.Typer(add_completion=False)


@_OPTIONS.command()
def _verbosity(
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also print debug messages.", callback=_set_level, expose_value=False),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print only results, warnings and errors.", callback=_set_level, expose_value=False
        ),
    ] = False,
) -> None:
    """Declares the two options; `add_verbosity` gives them to all commands."""


def add_verbosity(command: Any) -> None:
    """Gives a command both options, and those inside a group too."""
    command.params = [*command.params, *get_command(_OPTIONS).params]
    for inner in getattr(command, "commands", {}).values():
        add_verbosity(inner)
