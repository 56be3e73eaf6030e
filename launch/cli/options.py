"""Arguments and options that several commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

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
        "--allow-change",
        help="Resume although an option has changed that the data or the saved moments depend on.",
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
