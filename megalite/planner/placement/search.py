"""Searches for the placement of least cost: constructions, improvement by swaps, an exact search where it is small.

In: `Costs`. Out: picks, (node, number of ranks) in rank order. Everything is a function of the nodes' names, sizes and
switches: the same nodes give the same picks, and limits are on work, never on time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import numpy as np

from megalite.planner.placement.cost import Costs, Node, Picks

POOLS = 3  # groups of nodes tried per level
SWAP_WORK = 20_000_000  # pairs of nodes looked at while improving
EXACT_WORK = 300_000  # links looked at by the exact search: a few tenths of a second
TREE_NODES = 64  # more nodes are not searched exactly


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Returns a sort key that puts node2 before node10."""
    parts = (part for part in re.split(r"(\d+)", name) if part)
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts)


def first_fit(costs: Costs) -> list[tuple[int, int]]:
    """Fills the nodes in the order given, as a launcher does by default."""
    return _filled(range(len(costs.gpus)), costs.gpus, costs.mesh.world_size)


def search(costs: Costs, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Returns the best placement found. The nodes must have room for the mesh."""
    order = sorted(range(len(nodes)), key=lambda node: natural(nodes[node].name))
    order.sort(key=lambda node: [natural(switch) for switch in reversed(nodes[node].switches)])
    candidates = [first_fit(costs), *_constructions(costs, order)]
    best = min(candidates, key=costs.score)  # among equals the first one: the order that the user gave
    best = min([best, _improved(costs, best)], key=costs.score)
    if len(nodes) <= TREE_NODES:
        for any_count in (False, True):
            best = _Exact(costs, order, best, any_count).search()
    return best


def _filled(order: Sequence[int], room: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    picks = []
    for node in order:
        count = min(room[node], ranks)
        if count:
            picks.append((node, count))
            ranks -= count
    return picks


def _constructions(costs: Costs, order: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yields groups of near nodes, filled in turn or in tiles of stages and replicas."""
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for room in dict.fromkeys(map(tuple, _rooms(costs))):
        for pool in _pools(costs, order, room):
            picks = _picked(costs, pool, room, len(costs.groups) - 1, costs.mesh.world_size)
            found |= dict.fromkeys(map(tuple, [picks, *_tiles(costs, picks)]))
    yield from map(list, found)


def _rooms(costs: Costs) -> Iterator[list[int]]:
    """Yields the ranks that each node may get: all it has room for, whole groups, whole stages, one equal part of
    either."""
    tp, gpus, largest = costs.mesh.tensor_parallel_size, costs.gpus, max(costs.gpus)
    stage = tp * costs.mesh.replicas
    yield gpus
    for unit in (tp, stage):
        yield [size // unit * unit for size in gpus]
    step, whole = (tp, stage) if tp <= largest else (1, tp)
    for part in range(step, min(whole, largest) + 1, step):
        if whole % part == 0:
            yield [part if size >= part else 0 for size in gpus]


def _pools(costs: Costs, order: Sequence[int], room: Sequence[int]) -> Iterator[list[int]]:
    """Yields for each level the groups with room for all ranks, those of fewest nodes, then the fullest, first."""
    ranks = costs.mesh.world_size

    def key(pool: Sequence[int]) -> tuple[int, int]:
        sums = list(accumulate(sorted((room[node] for node in pool), reverse=True)))
        return next(number for number, total in enumerate(sums, 1) if total >= ranks), sums[-1]

    for group in costs.groups:
        members: dict[int, list[int]] = {}
        for node in order:
            members.setdefault(int(group[node]), []).append(node)
        fitting = [pool for pool in members.values() if sum(room[node] for node in pool) >= ranks]
        yield from sorted(fitting, key=key)[:POOLS]


def _picked(costs: Costs, pool: Sequence[int], room: Sequence[int], level: int, ranks: int) -> list[tuple[int, int]]:
    """Picks nodes that meet at `level`: the smallest part that has room for all, else the largest parts whole."""
    if level == 0:
        return [(pool[0], ranks)]
    below = costs.groups[level - 1]
    parts: dict[int, list[int]] = {}
    for node in pool:
        parts.setdefault(int(below[node]), []).append(node)
    size = {part: sum(room[node] for node in members) for part, members in parts.items()}
    left, picks = [part for part in parts if size[part]], []
    while ranks:
        fitting = [part for part in left if size[part] >= ranks]
        part = min(fitting, key=size.__getitem__) if fitting else max(left, key=size.__getitem__)
        left.remove(part)
        taken = min(ranks, size[part])
        picks += _picked(costs, parts[part], room, level - 1, taken)
        ranks -= taken
    return picks


def _tiles(costs: Costs, picks: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yields the same nodes in tiles: neighbours hold the same replicas of 2, 4, ... stages instead of replicas of one
    stage."""
    mesh = costs.mesh
    stage, count = mesh.tensor_parallel_size * mesh.replicas, picks[0][1]
    if count >= stage or any(other != count for _, other in picks[:-1]):
        return
    whole = len(picks) if picks[-1][1] == count else len(picks) - 1
    rows = [position * count // stage for position in range(whole)]
    columns = [position * count % stage // count for position in range(whole)]
    heights = {2**power for power in range(1, mesh.pipeline_parallel_size.bit_length())}
    for height in sorted(heights | {mesh.pipeline_parallel_size}):
        way = sorted(range(whole), key=lambda at: (rows[at] // height, columns[at], rows[at]))
        arranged = list(picks)
        for (node, _), position in zip(picks, way, strict=False):
            arranged[position] = node, count
        yield arranged


def _improved(costs: Costs, picks: Picks) -> list[tuple[int, int]]:
    """Swaps two nodes, or a used one for an unused one, as long as that lowers the cost. Counts stay in their
    places."""
    used = [node for node, _ in picks]
    places = used + sorted(set(range(len(costs.gpus))) - set(used))  # places behind the picks hold no rank
    counts = np.array([count for _, count in picks] + [0] * (len(places) - len(used)))
    node_of, gpus, size = np.array(places), np.array(costs.gpus), len(places)
    if size > 2000:
        return list(picks)
    between, distances = _bytes_between(costs, counts), costs.distances().astype(float)
    np.fill_diagonal(distances, 0.0)  # a place that moves to another's node finds that one on its own
    near = distances[np.ix_(node_of, node_of)]  # [place, place] what a byte between them costs now
    moved = between @ near  # [place, other] cost of a place if it was where the other one is
    for _ in range(min(10 * size, SWAP_WORK // size**2)):
        now, fits = moved.diagonal(), counts[:, None] <= gpus[node_of][None, :]
        change = moved + moved.T - now[:, None] - now[None, :] + 2 * between * near
        change[~(fits & fits.T)] = 0.0
        first, second = pair = divmod(int(change.argmin()), size)
        if change[pair] >= -0.5:  # bytes are whole numbers
            break
        node_of[[first, second]] = node_of[[second, first]]
        for rows in (near, near.T, moved.T):
            rows[[first, second]] = rows[[second, first]]
        moved += np.outer(between[:, first] - between[:, second], near[first] - near[second])
    return [(int(node), int(count)) for node, count in zip(node_of, counts, strict=True) if count]


def _bytes_between(costs: Costs, counts: np.ndarray) -> np.ndarray:
    """Returns `[place, place]` bytes between their ranks, both ways; zero on the diagonal."""
    place_of_rank = np.repeat(np.arange(len(counts)), counts)
    sources, targets = place_of_rank[costs.sources], place_of_rank[costs.targets]
    between = np.zeros((len(counts), len(counts)))
    np.add.at(between, (sources, targets), costs.bytes.astype(float))
    np.fill_diagonal(between, 0.0)
    return between + between.T


class _Exact:
    """Branch and bound over sequences of (kind of node, number of ranks); gives up, with the best so far, when the work
    is done. Nodes of one size in one leaf are of one kind, and so are leaves of equal nodes as long as they are unused.
    """

    def __init__(self, costs: Costs, order: Sequence[int], best: list[tuple[int, int]], any_count: bool) -> None:
        self._any_count = any_count
        self._costs, self._best, self._score, self._work = costs, best, costs.score(best), EXACT_WORK
        self._distances = costs.distances().tolist()
        self._links: list[list[tuple[int, int]]] = [[] for _ in range(costs.mesh.world_size)]  # to ranks before
        for source, target, size in zip(
            costs.sources.tolist(), costs.targets.tolist(), costs.bytes.tolist(), strict=True
        ):
            self._links[max(source, target)].append((min(source, target), size))
        behind = [sum(size for _, size in links) for links in self._links]
        self._least = [*accumulate(reversed(behind), initial=0)][::-1]  # of the links of this rank and all after it
        self._kinds = self._kinds_of(order)
        self._used: dict[tuple[int, int], int] = {}  # (level, group) -> nodes in use
        self._node_of_rank: list[int] = []
        self._picks: list[tuple[int, int]] = []

    def _kinds_of(self, order: Sequence[int]) -> list[list[int]]:
        def kind(node: int) -> tuple[int, ...]:
            return (*self._costs.groups[1:, node].tolist(), -self._costs.gpus[node])

        kinds = [list(nodes) for _, nodes in groupby(sorted(order, key=kind), kind)]
        self._shape = {
            (level, group): tuple(
                sorted(self._costs.gpus[node] for node in order if self._costs.groups[level, node] == group)
            )
            for level in range(1, len(self._costs.groups))
            for group in set(self._costs.groups[level].tolist())
        }
        return kinds

    def search(self) -> list[tuple[int, int]]:
        """Returns the best placement; the initial one if nothing is better."""
        self._extend(0, sum(self._costs.gpus))
        return self._best

    def _extend(self, cost: int, room: int) -> None:
        start, ranks = len(self._node_of_rank), self._costs.mesh.world_size
        if start == ranks:
            score = self._costs.score(self._picks)
            if score < self._score:
                self._best, self._score = list(self._picks), score
            return
        seen = set()
        for kind in self._kinds:
            if not kind or self._work <= 0 or (likeness := self._likeness(kind[0])) in seen:
                continue
            seen.add(likeness)
            node = kind.pop(0)
            room_left = room - self._costs.gpus[node]
            for count in self._counts(start, self._costs.gpus[node]):
                if ranks - start - count <= room_left:
                    self._place(node, count, cost, room_left)
            kind.insert(0, node)

    def _place(self, node: int, count: int, cost: int, room: int) -> None:
        start, row = len(self._node_of_rank), self._distances[node]
        for rank in range(start, start + count):
            self._node_of_rank.append(node)
            for other, size in self._links[rank]:
                cost += size * row[self._node_of_rank[other]]
            self._work -= len(self._links[rank]) + 1
        groups = [(level, int(self._costs.groups[level, node])) for level in range(1, len(self._costs.groups))]
        for group in groups:
            self._used[group] = self._used.get(group, 0) + 1
        self._picks.append((node, count))
        leaves = sum(number > 0 for (level, _), number in self._used.items() if level == 1)
        if (cost + self._least[start + count], leaves, len(self._picks)) <= self._score[:3]:
            self._extend(cost, room)
        self._picks.pop()
        for group in groups:
            self._used[group] -= 1
        del self._node_of_rank[start:]

    def _likeness(self, node: int) -> tuple[object, ...]:
        """Returns a key that is equal for nodes that are currently interchangeable."""
        groups = ((level, int(self._costs.groups[level, node])) for level in range(1, len(self._costs.groups)))
        return (*(group if self._used.get(group) else self._shape[group] for group in groups), self._costs.gpus[node])

    def _counts(self, start: int, gpus: int) -> list[int]:
        """Returns how many ranks a node may get: any number, or as many as fit and those that end whole groups or
        stages."""
        mesh = self._costs.mesh
        most = min(gpus, mesh.world_size - start)
        if self._any_count:
            return list(range(most, 0, -1))
        ends = {start + most}
        for unit in (mesh.tensor_parallel_size, mesh.tensor_parallel_size * mesh.replicas):
            ends.add((start + most) // unit * unit)
        return sorted((end - start for end in ends if end > start), reverse=True)
