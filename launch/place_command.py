"""`megalite place`: where a run's ranks would sit on given hosts, and what that costs. Starts nothing. No torch
here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.arguments import ConfigPath, Overrides
from launch.errors import LaunchError
from launch.run_config import load_run_config
from launch.topology import Topology, expand_hosts, read_topology
from megalite.config import Config, ResolvedLayout
from megalite.parallel.mesh import Mesh

if TYPE_CHECKING:
    from rich.table import Table

    from launch.placement import Node, Placement


@dataclass(frozen=True)
class HostRow:
    """One host's part of a run."""

    host: str
    first_rank: int
    last_rank: int
    stages: tuple[int, ...]
    replicas: tuple[int, ...]


def place(
    config_path: ConfigPath,
    overrides: Overrides = None,
    hostfile: Annotated[Path | None, typer.Option(help="Hosts with their slots, as for deepspeed.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help='Instead: "NAMES:GPUS" or "NAMES:GPUS:GIB", such as "node[1-8]:8:80;old[1-4]:4".')
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(help="Slurm's topology.conf, or what `scontrol show topology` printed.")
    ] = None,
    names: Annotated[
        bool, typer.Option("--names", help="Print a line per rank, its host, as SLURM_HOSTFILE has.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Choose hosts and their order for a layout, so that few bytes of a step cross hosts and switches; start nothing.

    Tensor-parallel groups stay inside hosts where they fit, replicas and neighbouring stages under one switch, and as
    few hosts and switches as possible are used. Compared with the hosts as given, each filled.

    Example: `megalite place configs/quickstart.yaml --nodes "node[1-4]:2"`
    """
    from launch.placement import place_run

    if names and as_json:
        raise LaunchError("--names and --json are two ways to print the result: give one of them")
    config = load_run_config(config_path, overrides or [])
    there = _nodes(hostfile, nodes, read_topology(topology) if topology is not None else None)
    layout = _layout(config, sum(node.gpus for node in there))
    best, first_fit = place_run(config, layout, there)
    if names:
        for notice in best.notices:
            print(f"megalite: {notice}", file=sys.stderr)
        for name, count in best.hosts:
            print(*[name] * count, sep="\n")
        return
    rows = host_rows(best, Mesh.of(layout))
    if as_json:
        print(json.dumps(_as_json(layout, rows, best, first_fit), indent=2))
        return
    from rich.console import Console

    console = Console(soft_wrap=True)
    console.print(_host_table(rows, layout))
    console.print(_crossing_table(best, first_fit))
    for notice in (*layout.notices, *best.notices):
        print(f"megalite: {notice}")


def host_rows(placement: Placement, mesh: Mesh) -> list[HostRow]:
    """Who sits where, in rank order."""
    rows, first = [], 0
    for name, count in placement.hosts:
        at = [mesh.coordinate(rank) for rank in range(first, first + count)]
        stages, replicas = ({c.pipeline_rank for c in at}, {c.data_rank for c in at})
        rows.append(HostRow(name, first, first + count - 1, tuple(sorted(stages)), tuple(sorted(replicas))))
        first += count
    return rows


def parse_nodes(words: str, topology: Topology | None) -> list[Node]:
    """`NAMES:GPUS[:GIB];...`, names as a Slurm host list. Raises LaunchError where it is not right."""
    from launch.placement import Node

    found: dict[str, Node] = {}
    for part in words.split(";"):
        names, *numbers = part.strip().split(":")
        is_right = names and 1 <= len(numbers) <= 2 and all(number.isdecimal() for number in numbers)
        if not is_right or int(numbers[0]) == 0:
            raise LaunchError(f"--nodes {words}: {part!r} is not NAMES:GPUS or NAMES:GPUS:GIB, such as node[1-8]:8:80")
        memory_gib = float(numbers[1]) if len(numbers) == 2 else None
        for name in expand_hosts(names, f"--nodes {words}"):
            if name in found:
                raise LaunchError(f"--nodes {words}: {name} is named twice: keep one of them")
            found[name] = Node(name, int(numbers[0]), memory_gib, topology.path(name) if topology else ())
    return list(found.values())


def _nodes(hostfile: Path | None, nodes: str | None, topology: Topology | None) -> list[Node]:
    from launch.hostfile import read_hostfile
    from launch.placement import nodes_of

    if hostfile is not None and nodes is None:
        return nodes_of(read_hostfile(hostfile), topology)
    if nodes is not None and hostfile is None:
        return parse_nodes(nodes, topology)
    raise LaunchError("say which hosts there are: give either --hostfile or --nodes")


def _layout(config: Config, room: int) -> ResolvedLayout:
    """On as many ranks as the config says, or, where data parallelism is auto, as there is room for."""
    parallel = config.parallel
    replica, replicas = parallel.tensor_parallel_size * parallel.pipeline_parallel_size, parallel.data_parallel_size
    return config.check_world(replica * (max(1, room // replica) if replicas == "auto" else replicas), "cuda")


def _as_json(layout: ResolvedLayout, rows: Sequence[HostRow], best: Placement, first_fit: Placement) -> dict[str, Any]:
    def facts(placement: Placement) -> dict[str, Any]:
        return {
            "bytes_per_step": placement.crossing,
            "cost": placement.cost,
            "hosts": len(placement.hosts),
            "leaves": placement.leaves,
        }

    return {
        "layout": asdict(layout),
        "ranks": [asdict(row) for row in rows],
        "placement": facts(best),
        "first_fit": facts(first_fit),
        "notices": [*layout.notices, *best.notices],
    }


def _host_table(rows: Sequence[HostRow], layout: ResolvedLayout) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{layout.world_size} ranks (tensor {layout.tensor_parallel_size} x pipeline "
        f"{layout.pipeline_parallel_size} x data {layout.data_parallel_size}) on {len(rows)} hosts",
        title_justify="left",
    )
    for column in ("host", "ranks", "stages", "replicas"):
        table.add_column(column, justify="left" if column == "host" else "right")
    for row in rows:
        ranks = _span(range(row.first_rank, row.last_rank + 1))
        table.add_row(row.host, ranks, _span(row.stages), _span(row.replicas))
    return table


def _crossing_table(best: Placement, first_fit: Placement) -> Table:
    from rich.table import Table

    table = Table(title="bytes of one optimizer step", title_justify="left")
    for column in ("", "this placement", "hosts as given"):
        table.add_column(column, justify="right" if column else "left")
    for level, size in best.crossing.items():
        table.add_row(level, _size(size), _size(first_fit.crossing[level]))
    table.add_row("hosts", str(len(best.hosts)), str(len(first_fit.hosts)))
    if len(best.crossing) > 2:
        table.add_row("leaf switches", str(best.leaves), str(first_fit.leaves))
    return table


def _span(numbers: Sequence[int]) -> str:
    """`0-3`; `0, 3` where there is a gap."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    return f"{first}-{last}" if len(numbers) == last - first + 1 else ", ".join(map(str, numbers))


def _size(size: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:,.3g} {units[0]}"
