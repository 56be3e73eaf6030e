"""Cost of a placement: bytes of one optimizer step that stay in a node, cross a leaf switch, or go further up.

In: nodes with the switches above them, a mesh, the traffic over its links. Out: bytes per level, and one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megalite.parallel.mesh import Mesh
from megalite.planner.cost.communication_volumes import Traffic

Numbers = npt.NDArray[np.int64]
Picks = Sequence[tuple[int, int]]  # in rank order: number of the node, how many ranks it gets

WITHIN, BETWEEN, APART = "within nodes", "between nodes", "no common switch"
SWITCH_LEVELS = ("within leaves", "across leaves")
NODE_COST = 1
LEAF_COST = 9  # an H100's NVLink moves 450 GB/s each way, its NDR adapter 50
STEP_UP = 2  # each switch level above is shared by twice as much traffic per uplink


@dataclass(frozen=True)
class Node:
    """A host and the devices on it that a run may use."""

    name: str
    gpus: int  # free ones; or ranks that it may run on its CPU
    memory_gib: float | None = None  # of each GPU; None: not known
    switches: tuple[str, ...] = ()  # above it, its leaf first


class Costs:
    """Distances between nodes, and the traffic between ranks."""

    def __init__(self, nodes: Sequence[Node], mesh: Mesh, traffic: Traffic) -> None:
        self.mesh = mesh
        self.gpus = [node.gpus for node in nodes]
        self.depth = max((len(node.switches) for node in nodes), default=0)
        # [level][node]: nodes with the same number meet at that level; at level 0 only with themselves, at the last all
        self.groups: Numbers = np.array(list(_groups(nodes)), dtype=np.int64)
        links = np.array(list(_links(mesh, traffic)), dtype=np.int64).reshape(-1, 3)
        links = links[links[:, 2] > 0]
        self.sources, self.targets, self.bytes = links.T

    @property
    def per_byte(self) -> tuple[int, ...]:
        """Cost of a byte on each level."""
        return (NODE_COST, *(LEAF_COST * STEP_UP**level for level in range(len(self.groups) - 1)))

    @property
    def levels(self) -> tuple[str, ...]:
        """Name of each level."""
        if self.depth == 0:
            return (WITHIN, BETWEEN)
        higher = (f"across level-{level} switches" for level in range(2, self.depth))
        named = (WITHIN, *(*SWITCH_LEVELS, *higher)[: self.depth])
        return named if len(named) == len(self.groups) else (*named, APART)

    def bytes_per_level(self, picks: Picks) -> tuple[int, ...]:
        """Returns the bytes of one step by the lowest level at which the two ranks meet."""
        node_of_rank = np.repeat([node for node, _ in picks], [count for _, count in picks])
        sources, targets = node_of_rank[self.sources], node_of_rank[self.targets]
        beyond = [int(self.bytes.sum())]
        beyond += [int(self.bytes[group[sources] != group[targets]].sum()) for group in self.groups]
        return tuple(lower - upper for lower, upper in pairwise(beyond))

    def cost(self, picks: Picks) -> int:
        """Returns the weighted bytes of one step; higher levels weigh more."""
        return sum(size * price for size, price in zip(self.bytes_per_level(picks), self.per_byte, strict=True))

    def score(self, picks: Picks) -> tuple[int, int, int, int]:
        """Returns the key to compare placements, least first: cost, leaves, nodes, unused GPUs on the nodes used."""
        used = [node for node, _ in picks]
        leaves = len(set(self.groups[1][used].tolist()))
        left = sum(self.gpus[node] - count for node, count in picks)
        return self.cost(picks), leaves, len(used), left

    def distances(self) -> Numbers:
        """Returns `[node, node]`: the cost of a byte between two nodes."""
        count = self.groups.shape[1]
        result = np.full((count, count), NODE_COST, dtype=np.int64)
        for group, price in zip(self.groups, self.per_byte[1:], strict=False):
            result[group[:, None] != group[None, :]] = price
        return result


def _groups(nodes: Sequence[Node]) -> Iterator[list[int]]:
    depth = max((len(node.switches) for node in nodes), default=0)
    yield list(range(len(nodes)))
    has_one_root = depth == 0
    for level in range(depth):
        # a root is its own parent; a node without switches meets others only where all do
        names = [
            ("switch", node.switches[min(level, len(node.switches) - 1)]) if node.switches else ("node", node.name)
            for node in nodes
        ]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        yield [numbers[name] for name in names]
        has_one_root = len(numbers) == 1
    if depth == 0 or not has_one_root:
        yield [0] * len(nodes)


def _links(mesh: Mesh, traffic: Traffic) -> Iterator[tuple[int, int, int]]:
    """Yields (rank, rank, bytes): rings of tensor-, context- and expert-parallel groups and of the copies of a
    weight in rank order, stages that exchange activations, tied weights."""
    cp, ep = mesh.context_parallel_size, mesh.expert_parallel_size
    tp, pp, dp = mesh.tensor_parallel_size, mesh.pipeline_parallel_size, mesh.replicas
    for stage in range(pp):
        for replica in range(dp):
            for cut in range(tp):
                rank = mesh.rank(stage, replica, cut)
                if tp > 1:
                    yield rank, mesh.rank(stage, replica, (cut + 1) % tp), traffic.tensor[stage]
                if cp > 1:
                    neighbour = replica - replica % cp + (replica + 1) % cp
                    yield rank, mesh.rank(stage, neighbour, cut), traffic.context[stage]
                if ep > 1:
                    neighbour = replica - replica % ep + (replica + 1) % ep
                    yield rank, mesh.rank(stage, neighbour, cut), traffic.experts[stage]
                    yield rank, mesh.rank(stage, (replica + ep) % dp, cut), traffic.expert_data[stage]
                if dp > 1:
                    yield rank, mesh.rank(stage, (replica + 1) % dp, cut), traffic.data[stage]
    for replica in range(dp):
        for cut in range(tp):
            for (first, second), size in traffic.pipeline.items():
                yield mesh.rank(first, replica, cut), mesh.rank(second, replica, cut), size
            if pp > 1:
                yield mesh.rank(0, replica, cut), mesh.rank(pp - 1, replica, cut), traffic.tied
