"""Arguments and options that several commands share, as typer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(help="YAML file", metavar="CONFIG.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.option=value ...", metavar="[OVERRIDES]...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Hostfile = Annotated[Path, typer.Option("--hostfile", "-H", help="Lines such as `node1 slots=8`.")]
Include = Annotated[str | None, typer.Option(help="Use these alone, as node1@node2:0,1.", metavar="HOST[:SLOTS]@...")]
Exclude = Annotated[str | None, typer.Option(help="Use all but these.", metavar="HOST[:SLOTS]@...")]
SshPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Where sshd listens on the hosts.")]
