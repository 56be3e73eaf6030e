"""Chooses the hosts of a run and their order, so that most traffic stays within hosts and switches. No torch.

Launchers assign ranks to hosts in order, so a placement is an order of hosts with a number of ranks each.
Tensor-parallel neighbours are adjacent ranks, stages are furthest apart (megalite/parallel/mesh.py). The cost of a
placement is the bytes of one optimizer step, with a higher weight for those that cross a switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launch.cluster.switch_topology import Topology
from launch.errors import LaunchError
from launch.runtime.hostfile import Host
from megalite.config import Config, ResolvedLayout
from megalite.parallel.mesh import Mesh
from megalite.planner.cost.communication_volumes import Traffic, traffic, volumes
from megalite.planner.cost.model_states import state_bytes
from megalite.planner.cost.stage_parameters import stages_of
from megalite.planner.placement.cost import Costs, Node, Picks
from megalite.planner.placement.search import first_fit, search
from megalite.planner.workload import TrainingWorkload
from megalite.units import plural


@dataclass(frozen=True)
class Placement:
    """Hosts in rank order, and the traffic of one optimizer step at each level of the network."""

    hosts: tuple[tuple[str, int], ...]  # name, number of ranks
    crossing: dict[str, int]  # level -> bytes, nearest level first
    cost: int  # the same bytes, weighted by level
    leaves: int  # number of leaf switches
    notices: tuple[str, ...]  # limits of the cluster, one sentence each


def place(nodes: Sequence[Node], mesh: Mesh, traffic: Traffic, needs_gib: float = 0.0) -> tuple[Placement, Placement]:
    """Returns the best placement found, which is never worse than first fit, and that of first fit.

    First fit fills the nodes in the given order. Nodes whose GPUs are known to have less than `needs_gib` are left out.
    Raises LaunchError if there are too few slots.
    """

    def is_large(node: Node) -> bool:
        return node.gpus > 0 and (node.memory_gib is None or node.memory_gib >= needs_gib)

    large = [node for node in nodes if is_large(node)]
    room = sum(node.gpus for node in large)
    if room < mesh.world_size:
        missing = [node.name for node in nodes if not is_large(node)]
        small = f" ({_listed(missing)} left out: no free slot, or less than {needs_gib:.3g} GiB of memory)"
        raise LaunchError(
            f"the layout {mesh} needs {mesh.world_size} slots, and {plural(len(large), 'host')} with {room} free "
            f"ones were given{small if missing else ''}: use a smaller layout or more hosts"
        )
    costs = Costs(large, mesh, traffic)
    best = search(costs, large)
    return _placement(costs, large, best), _placement(costs, large, first_fit(costs))


def place_run(config: Config, layout: ResolvedLayout, nodes: Sequence[Node]) -> tuple[Placement, Placement]:
    """Calls `place` with the traffic and memory of a run."""
    stages = stages_of(config, layout)
    needs_gib = max(state_bytes(config, layout, stage) for stage in stages) / 2**30
    job = TrainingWorkload.of(config, layout)
    return place(nodes, Mesh.of(layout), traffic(volumes(job, stages), job), needs_gib)


def nodes_of(hosts: Sequence[Host], topology: Topology | None) -> list[Node]:
    """Converts hosts to nodes."""
    return [Node(host.name, host.slots, switches=topology.path(host.name) if topology else ()) for host in hosts]


def place_hosts(
    config: Config, layout: ResolvedLayout, hosts: Sequence[Host], topology: Topology | None = None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Returns the hosts to use in rank order, each with exactly the devices that get a rank, and notices.

    Raises LaunchError if there are too few slots for the layout.
    """
    placement, _ = place_run(config, layout, nodes_of(hosts, topology))
    by_name = {host.name: host for host in hosts}
    chosen = tuple(replace(by_name[name], devices=by_name[name].devices[:count]) for name, count in placement.hosts)
    return chosen, placement.notices


def _placement(costs: Costs, nodes: Sequence[Node], picks: Picks) -> Placement:
    cost, leaves, *_ = costs.score(picks)
    return Placement(
        hosts=tuple((nodes[node].name, count) for node, count in picks),
        crossing=dict(zip(costs.levels, costs.bytes_per_level(picks), strict=True)),
        cost=cost,
        leaves=leaves,
        notices=tuple(_notices(costs, nodes, picks)),
    )


def _notices(costs: Costs, nodes: Sequence[Node], picks: Picks) -> Iterator[str]:
    """Reports tensor-parallel groups that span several hosts, and hosts that are missing from the topology."""
    tp, end, cut = costs.mesh.tensor_parallel_size, 0, set()
    for _, count in picks:
        end += count
        if end % tp:
            cut.add(end // tp)
    if cut:
        largest, why = max(costs.gpus), "too few hosts have room for whole groups"
        if largest < tp:
            why = f"no host has {tp} free slots (the largest has {largest})"
        groups = plural(costs.mesh.world_size // tp, "tensor-parallel group")
        yield (
            f"{len(cut)} of {groups} of {tp} ranks span several hosts, because {why}: their all-reduces, the most "
            "frequent traffic of all, leave the host; a tensor_parallel_size that divides the hosts' slots avoids it"
        )
    unknown = [node.name for node in nodes if not node.switches]
    if 0 < len(unknown) < len(nodes):
        yield f"the topology does not name {_listed(unknown)}: taken to be far from all others"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
