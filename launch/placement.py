"""Which hosts a run takes and in which order, so that much traffic stays near and little goes far. No torch.

Ranks are dealt to hosts in order, as many to each as it is given, because that is all that launchers do;
tensor-parallel neighbours are adjacent ranks, stages are furthest apart (megalite/parallel/mesh.py). So a placement
is an order of hosts with a number of ranks each. Its cost is the bytes of one optimizer step, those that cross a
switch counted more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.errors import LaunchError
from launch.hostfile import Host
from launch.placement_cost import Costs, Node, Picks
from launch.placement_search import first_fit, search
from launch.topology import Topology
from megalite.config import Config, ResolvedLayout
from megalite.parallel.mesh import Mesh
from megalite.planner.job import Job
from megalite.planner.shapes import stages_of
from megalite.planner.states import state_bytes
from megalite.planner.volumes import Traffic, traffic, volumes

__all__ = ["Node", "Placement", "nodes_of", "place", "place_hosts", "place_run"]


@dataclass(frozen=True)
class Placement:
    """Hosts in rank order, and what crosses what in one optimizer step."""

    hosts: tuple[tuple[str, int], ...]  # name, number of ranks
    crossing: dict[str, int]  # bytes per level, the nearest first
    cost: int  # the same, those of higher levels counted more
    leaves: int  # switches that hosts hang on directly
    notices: tuple[str, ...]  # what the cluster does not allow, one sentence each


def place(nodes: Sequence[Node], mesh: Mesh, traffic: Traffic, needs_gib: float = 0.0) -> tuple[Placement, Placement]:
    """The best placement found, and that of first fit: the nodes as given, each filled.

    The best one is never worse, and is the first one's where nothing is better. Nodes whose GPUs are known to have less
    than `needs_gib` are left out. Raises LaunchError where there is no room.
    """
    large = _with_room(nodes, mesh, needs_gib)
    costs = Costs(large, mesh, traffic)
    best = search(costs, large)
    return _placement(costs, large, best), _placement(costs, large, first_fit(costs))


def place_run(config: Config, layout: ResolvedLayout, nodes: Sequence[Node]) -> tuple[Placement, Placement]:
    """`place` with the traffic and memory of a run."""
    stages = stages_of(config, layout)
    needs_gib = max(state_bytes(config, layout, stage) for stage in stages) / 2**30
    job = Job.of(config, layout)
    return place(nodes, Mesh.of(layout), traffic(volumes(job, stages), job), needs_gib)


def nodes_of(hosts: Sequence[Host], topology: Topology | None) -> list[Node]:
    """Hosts as nodes."""
    return [Node(host.name, host.slots, switches=topology.path(host.name) if topology else ()) for host in hosts]


def place_hosts(
    config: Config, layout: ResolvedLayout, hosts: Sequence[Host], topology: Topology | None = None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """The hosts to start in rank order, each with exactly the devices that get a rank, and notices.

    Raises LaunchError where the layout has no room.
    """
    placement, _ = place_run(config, layout, nodes_of(hosts, topology))
    by_name = {host.name: host for host in hosts}
    chosen = tuple(replace(by_name[name], devices=by_name[name].devices[:count]) for name, count in placement.hosts)
    return chosen, placement.notices


def _with_room(nodes: Sequence[Node], mesh: Mesh, needs_gib: float) -> list[Node]:
    """The nodes that can be used. Raises LaunchError where they are too few."""

    def is_large(node: Node) -> bool:
        return node.gpus > 0 and (node.memory_gib is None or node.memory_gib >= needs_gib)

    large = [node for node in nodes if is_large(node)]
    room = sum(node.gpus for node in large)
    if room >= mesh.world_size:
        return large
    missing = [node.name for node in nodes if not is_large(node)]
    small = f" ({_listed(missing)} left out: no free slot, or less than {needs_gib:.3g} GiB of memory)"
    raise LaunchError(
        f"the layout {mesh} needs {mesh.world_size} slots, and {_counted(len(large), 'host')} with {room} free ones "
        f"were given{small if missing else ''}: use a smaller layout or more hosts"
    )


def _placement(costs: Costs, nodes: Sequence[Node], picks: Picks) -> Placement:
    per_level = costs.bytes_per_level(picks)
    cost, leaves, *_ = costs.score(picks)
    return Placement(
        hosts=tuple((nodes[node].name, count) for node, count in picks),
        crossing=dict(zip(costs.levels, per_level, strict=True)),
        cost=cost,
        leaves=leaves,
        notices=(*_tensor_notice(costs, picks), *_topology_notice(nodes)),
    )


def _tensor_notice(costs: Costs, picks: Picks) -> tuple[str, ...]:
    """Says where tensor-parallel groups are cut by a host's end."""
    tp, end, cut = costs.mesh.tensor_parallel_size, 0, set()
    for _, count in picks:
        end += count
        if end % tp:
            cut.add(end // tp)
    if not cut:
        return ()
    groups = costs.mesh.world_size // tp
    largest = max(costs.gpus)
    why = (
        f"no host has {tp} free slots (the largest has {largest})"
        if largest < tp
        else "too few hosts have room for whole groups"
    )
    return (
        f"{len(cut)} of {_counted(groups, 'tensor-parallel group')} of {tp} ranks span several hosts, because {why}: "
        "their all-reduces, the most frequent traffic of all, leave the host; a tensor_parallel_size that divides the "
        "hosts' slots avoids it",
    )


def _topology_notice(nodes: Sequence[Node]) -> tuple[str, ...]:
    unknown = [node.name for node in nodes if not node.switches]
    if not unknown or len(unknown) == len(nodes):
        return ()
    return (f"the topology does not name {_listed(unknown)}: taken to be far from all others",)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
