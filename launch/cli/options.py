"""Arguments and options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from launch.errors import LaunchError

MOST_ACCELERATORS = 10_000_000  # more is a typing error

ConfigPath = Annotated[Path, typer.Argument(help="YAML file", metavar="CONFIG.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.option=value ...", metavar="[OVERRIDES]...")]
Force = Annotated[
    bool, typer.Option("--force", help="Start although the predicted memory is more than the devices have.")
]
AllowChange = Annotated[
    bool,
    typer.Option(
        "--allow-change", help="Resume although an option has changed that the data or the saved moments depend on."
    ),
]
SharedRunDir = Annotated[
    bool,
    typer.Option(
        "--shared-run-dir", help="Start in a run_dir that others own or that a group may write: they are trusted."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ModelTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="Folder of the model's tokenizer; default: where the model has it. Its digest is compared."
    ),
]
OutputFile = Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: standard output.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --output file.")]
Hostfile = Annotated[Path, typer.Option("--hostfile", "-H", help="File with lines such as `node1 slots=8`.")]
Include = Annotated[
    str | None,
    typer.Option(help="Use only these hosts and slots, such as node1@node2:0,1.", metavar="HOST[:SLOTS]@..."),
]
Exclude = Annotated[str | None, typer.Option(help="Do not use these hosts and slots.", metavar="HOST[:SLOTS]@...")]
TopologyPath = Annotated[
    Path | None, typer.Option(help="Slurm's topology.conf, or the output of `scontrol show topology`.")
]
Restarts = Annotated[int, typer.Option(min=0, help="Maximum number of restarts.")]
FirstWait = Annotated[float, typer.Option(min=0, help="Seconds before the first restart; doubles each time.")]
LongestWait = Annotated[float, typer.Option(min=0, help="Maximum seconds before a restart.")]
Grace = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds from SIGTERM or SIGHUP until remaining processes are killed; SIGUSR1 sets no limit."
    ),
]
Silence = Annotated[
    float,
    typer.Option(min=0, help="Heartbeat timeout: restart all ranks after this many seconds without one; 0: never."),
]
SshPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of sshd on the hosts.")]

PricePerAcceleratorHour = Annotated[
    float | None,
    typer.Option("--price-per-accelerator-hour", help="Price of one accelerator for an hour, in any currency."),
]


class CommandOptions:
    """The arguments and options of a command: each annotated field of a subclass, its own before those it inherits."""

    def __init__(self, context: typer.Context, values: Mapping[str, Any]) -> None:
        vars(self).update(values)
        self.given = {name for option in context.command.params if (name := _given_name(context, option))}

    def check_numbers(self, *, above_0: str = "", from_0: str = "") -> None:
        """Raises LaunchError where a field that is named, if it has a value, is no such finite number."""
        for name in (*above_0.split(), *from_0.split()):
            if (value := getattr(self, name)) is not None:
                finite_number(f"--{name.replace('_', '-')}", value, zero=name in from_0.split())


Model = TypeVar("Model", bound=CommandOptions)


def taking(model: type[Model]) -> Callable[[Callable[[Model], None]], Callable[..., None]]:
    """Makes of a function of `model` a command with the options that typer derives from its fields."""
    names = dict.fromkeys(name for one in model.__mro__ for name in vars(one).get("__annotations__", ()))
    hints = get_type_hints(model, include_extras=True)
    fields = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(model, name, Parameter.empty), annotation=hints[name])
        for name in names
    ]

    def of(command: Callable[[Model], None]) -> Callable[..., None]:
        @wraps(command)
        def run(context: typer.Context, **values: Any) -> None:
            command(model(context, values))

        context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        run.__signature__ = Signature([context, *fields])  # type: ignore[attr-defined]
        return run

    return of


def _given_name(context: typer.Context, option: Any) -> str:
    """The long form of an option on the command line, such as `--blocking` for a flag that was negated; empty where it
    is not there."""
    if getattr(context.get_parameter_source(option.name), "name", "") != "COMMANDLINE":
        return ""
    if option.param_type_name != "option":
        return option.name
    is_negated = context.params.get(option.name) is False and option.secondary_opts
    return max(option.secondary_opts if is_negated else option.opts, key=len)


def check_one_format(*, as_json: bool, as_csv: bool) -> None:
    """Raises LaunchError where both --json and --csv are given."""
    if as_json and as_csv:
        raise LaunchError("--json and --csv are two ways to print the result: give one of them")


def checked_price(price: float | None) -> float | None:
    """Returns the value of --price-per-accelerator-hour. Raises LaunchError if it is no price."""
    return None if price is None else finite_number("--price-per-accelerator-hour", price, zero=True)


def finite_number(option: str, value: float, zero: bool = False) -> float:
    """Returns the value of an option that must be above 0, or from 0 up with `zero`. Raises LaunchError."""
    if not (value > 0 or (zero and value == 0)) or not math.isfinite(value):
        raise LaunchError(f"{option} {value:g}: must be a finite number {'from 0 up' if zero else 'above 0'}")
    return value
