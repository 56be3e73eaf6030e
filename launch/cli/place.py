"""The command `megalite place`, which shows the best placement of a run on hosts. No torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from data_pipeline.storage.paths import decimal_size
from launch.cli.options import AsJson, ConfigPath, Overrides, TopologyPath
from launch.cluster.placement import Placement, nodes_of, place_run
from launch.cluster.switch_topology import Topology, expand_hosts, read_topology
from launch.errors import LaunchError
from launch.inspection.timelines import format_numbers
from launch.output import Table, print_json
from launch.prediction.auto_layout import format_sizes
from launch.runtime.hostfile import read_hostfile
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.trainer.start.run_config import load_run_config
from megalite.config import Config, ResolvedLayout, resolve_layout
from megalite.parallel.mesh import Mesh
from megalite.planner.placement.cost import Node

log = get_logger(__name__)


def place(
    config_path: ConfigPath,
    overrides: Overrides = None,
    hostfile: Annotated[Path | None, typer.Option(help="Hosts with their slots, as for deepspeed.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help='Hosts as "NAMES:GPUS" or "NAMES:GPUS:GIB", such as "node[1-8]:8:80;old[1-4]:4".')
    ] = None,
    topology: TopologyPath = None,
    names: Annotated[
        bool, typer.Option("--names", help="Print the host of each rank on a line, as in SLURM_HOSTFILE.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Choose hosts and their order for a layout so that little traffic crosses hosts and switches; start nothing.

    Tensor-parallel groups stay inside hosts if they fit, replicas and neighbouring stages under one switch, and as few
    hosts and switches as possible are used. The result is compared with filling the hosts in the given order.

    Example: `megalite place configs/quickstart.yaml --nodes "node[1-4]:2"`
    """
    if names and as_json:
        raise LaunchError("--names and --json are two ways to print the result: give one of them")
    config = load_run_config(config_path, overrides or [])
    switches = read_topology(topology) if topology is not None else None
    if hostfile is not None and nodes is None:
        available = nodes_of(read_hostfile(hostfile), switches)
    elif nodes is not None and hostfile is None:
        available = parse_nodes(nodes, switches)
    else:
        raise LaunchError(
            "--hostfile and --nodes are two ways to say which hosts there are: give one of them"
            if nodes is not None
            else "say which hosts there are: give either --hostfile or --nodes"
        )
    layout = _layout(config, sum(node.gpus for node in available))
    best, first_fit = place_run(config, layout, available)
    if names:
        for notice in best.notices:
            log.warning(notice)
        for name, count in best.hosts:
            say(*[name] * count, sep="\n")
        return
    rows, notices = _host_rows(best, Mesh.of(layout)), [*layout.notices, *best.notices]
    if as_json:
        result = {"layout": asdict(layout), "ranks": rows, "placement": _facts(best), "first_fit": _facts(first_fit)}
        print_json({**result, "notices": notices})
        return
    cells = []
    for row in rows:
        ranks = range(row["first_rank"], row["last_rank"] + 1)
        cells.append(
            (row["host"], format_numbers(ranks), format_numbers(row["stages"]), format_numbers(row["replicas"]))
        )
    title = f"{layout.world_size} ranks ({format_sizes(config, layout)}) on {len(rows)} hosts"
    Table(("host", "ranks", "stages", "replicas"), cells, title).print()
    levels = [
        (level, decimal_size(size), decimal_size(first_fit.crossing[level])) for level, size in best.crossing.items()
    ]
    levels.append(("hosts", str(len(best.hosts)), str(len(first_fit.hosts))))
    if len(best.crossing) > 2:
        levels.append(("leaf switches", str(best.leaves), str(first_fit.leaves)))
    Table(("", "this placement", "hosts as given"), levels, "bytes of one optimizer step").print()
    for notice in notices:
        log.info(notice)


def _host_rows(placement: Placement, mesh: Mesh) -> list[dict[str, Any]]:
    """Returns the ranks, stages and replicas on each host, in rank order."""
    rows, first = [], 0
    for name, count in placement.hosts:
        at = [mesh.coordinate(rank) for rank in range(first, first + count)]
        stages, replicas = sorted({c.pipeline_rank for c in at}), sorted({c.replica for c in at})
        ranks = {"host": name, "first_rank": first, "last_rank": first + count - 1}
        rows.append({**ranks, "stages": stages, "replicas": replicas})
        first += count
    return rows


def _facts(placement: Placement) -> dict[str, Any]:
    return {
        "bytes_per_step": placement.crossing,
        "cost": placement.cost,
        "hosts": len(placement.hosts),
        "leaves": placement.leaves,
    }


def parse_nodes(text: str, topology: Topology | None) -> list[Node]:
    """Parses `NAMES:GPUS[:GIB];...`, with names as a Slurm host list. Raises LaunchError if it is malformed."""
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


def _layout(config: Config, room: int) -> ResolvedLayout:
    """Returns the layout on the ranks of the config, or if data parallelism is auto, on as many as fit `room` slots."""
    parallel = config.parallel
    replica, replicas = parallel.ranks_per_replica, parallel.data_parallel_size
    return resolve_layout(config, replica * (max(1, room // replica) if replicas == "auto" else replicas), "cuda")
