"""The options --verbose and --quiet, which every command takes before or after its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from launch.errors import LaunchError
from launch.runtime.logs import configure_logging

VERBOSITY = ("--verbose", "-v", "--quiet", "-q")
LEVELS = {"verbose": "DEBUG", "quiet": "WARNING"}


def _set_level(context: typer.Context, option: typer.CallbackParam, is_given: bool) -> None:
    """Sets the level of messages for this command and the processes that it starts. Raises LaunchError for both."""
    name = option.name or ""
    if not is_given or context.resilient_parsing:
        return
    if context.meta.setdefault("verbosity", name) != name:
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
    """Declares the two options; `CommandsWithVerbosity` gives them to all commands."""


class CommandsWithVerbosity(TyperGroup):
    """A group that takes --verbose and --quiet, as do all its commands and groups and the commands in those."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        options = get_command(_OPTIONS).params
        for command in (self, *_commands_in(self)):
            command.params = [*command.params, *options]


def _commands_in(group: TyperGroup) -> Iterator[Any]:
    for command in group.commands.values():
        yield command
        if isinstance(command, TyperGroup):
            yield from _commands_in(command)
