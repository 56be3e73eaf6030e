"""Command-line options of `megalite place`, which shows the best placement of a run on hosts. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import ConfigPath, Overrides
from launch.cluster.switch_topology import Topology, expand_hosts, read_topology
from launch.errors import LaunchError
from launch.runtime.logs import get_logger
from launch.trainer.run_config import load_run_config
from megalite.config import Config, ResolvedLayout, resolve_layout
from megalite.parallel.mesh import Mesh

if TYPE_CHECKING:
    from launch.cluster.placement import Node, Placement
    from launch.output import Table

log = get_logger(__name__)


@dataclass(frozen=True)
class HostRow:
    """Ranks, stages and replicas of a run on one host."""

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
        str | None, typer.Option(help='Hosts as "NAMES:GPUS" or "NAMES:GPUS:GIB", such as "node[1-8]:8:80;old[1-4]:4".')
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(help="Slurm's topology.conf, or the output of `scontrol show topology`.")
    ] = None,
    names: Annotated[
        bool, typer.Option("--names", help="Print the host of each rank on a line, as in SLURM_HOSTFILE.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Choose hosts and their order for a layout so that little traffic crosses hosts and switches; start nothing.

    Tensor-parallel groups stay inside hosts if they fit, replicas and neighbouring stages under one switch, and as few
    hosts and switches as possible are used. The result is compared with filling the hosts in the given order.

    Example: `megalite place configs/quickstart.yaml --nodes "node[1-4]:2"`
    """
    from launch.cluster.placement import place_run

    if names and as_json:
        raise LaunchError("--names and --json are two ways to print the result: give one of them")
    config = load_run_config(config_path, overrides or [])
    available = _nodes(hostfile, nodes, read_topology(topology) if topology is not None else None)
    layout = _layout(config, sum(node.gpus for node in available))
    best, first_fit = place_run(config, layout, available)
    if names:
        for notice in best.notices:
            log.warning(notice)
        for name, count in best.hosts:
            print(*[name] * count, sep="\n")
        return
    rows = host_rows(best, Mesh.of(layout))
    if as_json:
        print(json.dumps(_as_json(layout, rows, best, first_fit), indent=2))
        return
    _host_table(rows, layout).print()
    _crossing_table(best, first_fit).print()
    for notice in (*layout.notices, *best.notices):
        log.info(notice)


def host_rows(placement: Placement, mesh: Mesh) -> list[HostRow]:
    """Returns the part of each host, in rank order."""
    rows, first = [], 0
    for name, count in placement.hosts:
        at = [mesh.coordinate(rank) for rank in range(first, first + count)]
        stages, replicas = ({c.pipeline_rank for c in at}, {c.data_rank for c in at})
        rows.append(HostRow(name, first, first + count - 1, tuple(sorted(stages)), tuple(sorted(replicas))))
        first += count
    return rows


def parse_nodes(text: str, topology: Topology | None) -> list[Node]:
    """Parses `NAMES:GPUS[:GIB];...`, with names as a Slurm host list. Raises LaunchError if it is malformed."""
    from launch.cluster.placement import Node

    found: dict[str, Node] = {}
    for part in text.split(";"):
        names, *numbers = part.strip().split(":")
        is_right = names and 1 <= len(numbers) <= 2 and all(number.isdecimal() for number in numbers)
        if not is_right or int(numbers[0]) == 0:
            raise LaunchError(f"--nodes {text}: {part!r} is not NAMES:GPUS or NAMES:GPUS:GIB, such as node[1-8]:8:80")
        memory_gib = float(numbers[1]) if len(numbers) == 2 else None
        for name in expand_hosts(names, f"--nodes {text}"):
            if name in found:
                raise LaunchError(f"--nodes {text}: {name} is named twice: keep one of them")
            found[name] = Node(name, int(numbers[0]), memory_gib, topology.path(name) if topology else ())
    return list(found.values())


def _nodes(hostfile: Path | None, nodes: str | None, topology: Topology | None) -> list[Node]:
    from launch.cluster.placement import nodes_of
    from launch.runtime.hostfile import read_hostfile

    if hostfile is not None and nodes is None:
        return nodes_of(read_hostfile(hostfile), topology)
    if nodes is not None and hostfile is None:
        return parse_nodes(nodes, topology)
    raise LaunchError("say which hosts there are: give either --hostfile or --nodes")


def _layout(config: Config, room: int) -> ResolvedLayout:
    """Returns the layout on the ranks of the config, or if data parallelism is auto, on as many as fit `room` slots."""
    parallel = config.parallel
    replica, replicas = parallel.tensor_parallel_size * parallel.pipeline_parallel_size, parallel.data_parallel_size
    return resolve_layout(config, replica * (max(1, room // replica) if replicas == "auto" else replicas), "cuda")


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
    from launch.output import Table

    return Table(
        ("host", "ranks", "stages", "replicas"),
        [
            (row.host, _span(range(row.first_rank, row.last_rank + 1)), _span(row.stages), _span(row.replicas))
            for row in rows
        ],
        title=f"{layout.world_size} ranks (tensor {layout.tensor_parallel_size} x pipeline "
        f"{layout.pipeline_parallel_size} x data {layout.data_parallel_size}) on {len(rows)} hosts",
    )


def _crossing_table(best: Placement, first_fit: Placement) -> Table:
    from launch.output import Table

    rows = [(level, _size(size), _size(first_fit.crossing[level])) for level, size in best.crossing.items()]
    rows.append(("hosts", str(len(best.hosts)), str(len(first_fit.hosts))))
    if len(best.crossing) > 2:
        rows.append(("leaf switches", str(best.leaves), str(first_fit.leaves)))
    return Table(("", "this placement", "hosts as given"), rows, title="bytes of one optimizer step")


def _span(numbers: Sequence[int]) -> str:
    """Formats sorted numbers as `0-3`, or `0, 3` if there is a gap."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    return f"{first}-{last}" if len(numbers) == last - first + 1 else ", ".join(map(str, numbers))


def _size(size: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:,.3g} {units[0]}"
