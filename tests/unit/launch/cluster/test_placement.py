"""What a placement promises, on random clusters: room is never exceeded, first fit is never better, one host is found
where one is enough, and nothing depends on chance.

Costs are computed a second time here, rank by rank and with sets of switches instead of arrays.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from launch.cluster.placement import Placement, place, place_hosts
from launch.cluster.switch_topology import parse_topology
from launch.errors import LaunchError
from launch.runtime.hostfile import Host
from megalite.config import resolve_layout
from megalite.parallel.mesh import Mesh
from megalite.planner.cost.communication_volumes import Traffic
from megalite.planner.placement.cost import Node
from tests.helpers.engine_cases import Case

DEPTHS = (0, 1, 2, 3)


def path(leaf: int, depth: int) -> tuple[str, ...]:
    """Switches above a leaf's nodes; with one level of switches there is nothing that connects them."""
    return (f"leaf{leaf}", f"pod{leaf // 2}", "root")[:depth] if depth != 2 else (f"leaf{leaf}", "root")


@dataclass(frozen=True)
class Problem:
    """A cluster, and a job that it has room for."""

    nodes: list[Node]
    mesh: Mesh
    traffic: Traffic


def neighbours(stages: int, size: int) -> dict[tuple[int, int], int]:
    """As many bytes between all stages that follow on each other."""
    return {(stage, stage + 1): size for stage in range(stages - 1)}


@st.composite
def problems(draw: st.DrawFn, most_nodes: int = 6, most_gpus: int = 8, most_ranks: int = 32) -> Problem:
    depth = draw(st.sampled_from(DEPTHS))
    sizes = draw(st.lists(st.integers(0, most_gpus), min_size=1, max_size=most_nodes).filter(any))
    leaves = st.one_of(st.integers(0, 3), st.none()) if depth and draw(st.booleans()) else st.integers(0, 3)
    nodes = []
    for number, gpus in enumerate(sizes):
        leaf = draw(leaves)  # none: the topology does not name it
        nodes.append(Node(f"n{number}", gpus, switches=() if leaf is None else path(leaf, depth)))
    most = min(most_ranks, sum(sizes))
    tp = draw(st.integers(1, min(8, most)))
    pp = draw(st.integers(1, min(4, most // tp)))
    mesh = Mesh(tp, pp, draw(st.integers(1, most // (tp * pp))))
    size = st.integers(0, 10**9)

    def several(count: int) -> tuple[int, ...]:
        return tuple(draw(size) for _ in range(count))

    pairs = [(stage, stage + 1) for stage in range(pp - 1)] + [(0, pp - 1)] * (pp > 2 and draw(st.booleans()))
    pipeline = {
        pair: draw(size) for pair in pairs
    }  # chunks of interleaved stages also pass on from the last to the first
    return Problem(nodes, mesh, Traffic(several(pp), several(pp), pipeline, draw(size)))


def links(mesh: Mesh, traffic: Traffic) -> Iterator[tuple[int, int, int]]:
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        stage, replica, cut = at.pipeline_rank, at.replica, at.tensor_rank
        yield rank, mesh.rank(stage, replica, (cut + 1) % mesh.tensor_parallel_size), traffic.tensor[stage]
        yield rank, mesh.rank(stage, (replica + 1) % mesh.data_parallel_size, cut), traffic.data[stage]
        for other in range(stage):
            yield rank, mesh.rank(other, replica, cut), traffic.pipeline.get((other, stage), 0)
        if stage == mesh.pipeline_parallel_size - 1 > 0:
            yield rank, mesh.rank(0, replica, cut), traffic.tied


def cost_of(hosts: tuple[tuple[str, int], ...], nodes: list[Node], mesh: Mesh, traffic: Traffic) -> int:
    """1 for a byte within a node, 9 within a leaf, 18, 36, ... further up."""
    nodes = [node for node in nodes if node.gpus]  # the others are not there
    by_name = {node.name: node for node in nodes}
    at = [by_name[name] for name, count in hosts for _ in range(count)]
    total = 0
    for first, second, size in links(mesh, traffic):
        if first == second:
            continue
        one, other = at[first], at[second]
        if one is other:
            total += size
        elif not any(node.switches for node in nodes):
            total += 9 * size
        else:
            depth = max(len(node.switches) for node in nodes)
            common = [level for level, switch in enumerate(one.switches) if switch in other.switches]
            total += 9 * 2 ** (common[0] if common else depth) * size
    return total


@given(problems())
def test_no_host_gets_more_than_it_has_and_first_fit_is_never_better(problem: Problem) -> None:
    nodes, mesh, traffic = problem.nodes, problem.mesh, problem.traffic
    best, first_fit = place(nodes, mesh, traffic)
    free = {node.name: node.gpus for node in nodes}
    for placement in (best, first_fit):
        names = [name for name, _ in placement.hosts]
        assert len(set(names)) == len(names)
        assert all(0 < count <= free[name] for name, count in placement.hosts)
        assert sum(count for _, count in placement.hosts) == mesh.world_size
        assert placement.cost == cost_of(placement.hosts, nodes, mesh, traffic)
        assert sum(placement.crossing.values()) == sum(size for a, b, size in links(mesh, traffic) if a != b)
    assert best.cost <= first_fit.cost
    expected, left = [], mesh.world_size
    for node in nodes:
        if min(node.gpus, left):
            expected.append((node.name, min(node.gpus, left)))
            left -= min(node.gpus, left)
    assert list(first_fit.hosts) == expected


@given(problems(most_ranks=8))
def test_one_host_is_taken_where_one_is_enough(problem: Problem) -> None:
    nodes, mesh, traffic = problem.nodes, problem.mesh, problem.traffic
    enough = [node.gpus for node in nodes if node.gpus >= mesh.world_size]
    assume(enough)
    ((name, count),) = place(nodes, mesh, traffic)[0].hosts
    assert count == mesh.world_size
    assert {node.name: node.gpus for node in nodes}[name] == min(enough), "the fullest one, so that others stay whole"


@given(problems(most_nodes=4, most_gpus=4, most_ranks=9), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_order_of_the_input_decides_ties_only(problem: Problem, chance: random.Random) -> None:
    """Where the search goes to its end; in a larger cluster it begins from the order given and may end before."""
    nodes, mesh, traffic = problem.nodes, problem.mesh, problem.traffic
    best = place(nodes, mesh, traffic)[0]
    assert place(nodes, mesh, traffic)[0] == best
    again = place(chance.sample(nodes, len(nodes)), mesh, traffic)[0]
    assert (again.cost, again.leaves, len(again.hosts)) == (best.cost, best.leaves, len(best.hosts))


@given(problems(most_nodes=4, most_gpus=4, most_ranks=9))
@settings(max_examples=60)
def test_small_clusters_are_searched_through(problem: Problem) -> None:
    """Against every order of every choice of hosts with every number of ranks each."""
    nodes, mesh, traffic = problem.nodes, problem.mesh, problem.traffic
    best = place(nodes, mesh, traffic)[0]
    assert best.cost == min(cost_of(hosts, nodes, mesh, traffic) for hosts in all_placements(nodes, mesh.world_size))


def all_placements(nodes: list[Node], ranks: int) -> Iterator[tuple[tuple[str, int], ...]]:
    if ranks == 0:
        yield ()
    for node in nodes:
        others = [other for other in nodes if other is not node]
        for count in range(1, min(node.gpus, ranks) + 1):
            for rest in all_placements(others, ranks - count):
                yield ((node.name, count), *rest)


def test_a_host_may_get_any_number_of_ranks() -> None:
    """Where it pays: half of the first host is left free, so that the heavier two stages are neighbours."""
    nodes = [Node("a", 4, switches=("one", "root")), Node("b", 4, switches=("two", "root"))]
    best, first_fit = place(nodes, Mesh(2, 3, 1), Traffic((1, 1, 1), (0, 0, 0), {(0, 1): 10, (1, 2): 100}, 0))
    assert [count for _, count in best.hosts] == [2, 4] and [count for _, count in first_fit.hosts] == [4, 2]


def test_hosts_of_many_sizes_are_combined() -> None:
    """More orders than the search can look at with any number of ranks per host; whole groups and stages come first."""
    cluster = [(2, 0), (2, 0), (6, 1), (8, 2), (8, 2), (4, 1), (4, 2)]
    nodes = [Node(f"n{i}", gpus, switches=(f"leaf{leaf}", "root")) for i, (gpus, leaf) in enumerate(cluster)]
    best, first_fit = place(nodes, Mesh(2, 4, 3), Traffic((1000,) * 4, (100,) * 4, neighbours(4, 30), 0))
    assert best.cost <= 35_600 < first_fit.cost


def test_the_last_host_is_one_that_is_filled() -> None:
    nodes = [Node(f"n{number}", 4 if number == 50 else 8, switches=("leaf",)) for number in range(100)]
    best, _ = place(nodes, Mesh(4, 1, 21), Traffic((10**6,), (10**3,), {}, 0))
    assert best.hosts[-1] == ("n50", 4) and len(best.hosts) == 11


def leaves_of(placement: Placement, nodes: list[Node]) -> list[str]:
    by_name = {node.name: node.switches[0] for node in nodes}
    return [by_name[name] for name, _ in placement.hosts]


def grid(leaves: int, per_leaf: int, gpus: int = 8) -> list[Node]:
    """Nodes of several leaves under one spine, in an order that means nothing."""
    nodes = [
        Node(f"n{leaf}-{i}", gpus, switches=(f"leaf{leaf}", "spine")) for leaf in range(leaves) for i in range(per_leaf)
    ]
    return random.Random(3).sample(nodes, len(nodes))


def test_rings_of_replicas_stay_in_a_leaf_where_gradients_are_most() -> None:
    nodes = grid(leaves=4, per_leaf=4)
    best, _ = place(nodes, Mesh(8, 4, 4), Traffic((10**9,) * 4, (10**6,) * 4, neighbours(4, 10), 0))
    by_stage = [set(leaves_of(best, nodes)[4 * stage : 4 * stage + 4]) for stage in range(4)]
    assert all(len(leaves) == 1 for leaves in by_stage)


def test_pipelines_stay_in_a_leaf_where_activations_are_most() -> None:
    nodes = grid(leaves=4, per_leaf=4)
    best, _ = place(nodes, Mesh(8, 4, 4), Traffic((10**9,) * 4, (10,) * 4, neighbours(4, 10**6), 0))
    leaves = leaves_of(best, nodes)
    assert all(len(set(leaves[replica::4])) == 1 for replica in range(4))


def test_tensor_groups_stay_in_hosts_where_they_fit() -> None:
    nodes = [Node(f"n{number}", 6) for number in range(4)]
    best, first_fit = place(nodes, Mesh(4, 1, 3), Traffic((10**6,), (10**3,), {}, 0))
    assert [count for _, count in best.hosts] == [4, 4, 4] and not best.notices
    assert [count for _, count in first_fit.hosts] == [6, 6]
    assert "1 of 3 tensor-parallel groups of 4 ranks span several hosts" in first_fit.notices[0]


def test_few_leaves_and_few_hosts_are_used() -> None:
    nodes = [*grid(leaves=3, per_leaf=4, gpus=4), Node("wide", 8, switches=("leaf9", "spine"))]
    best, _ = place(nodes, Mesh(4, 1, 4), Traffic((10**6,), (10**5,), {}, 0))
    assert len(best.hosts) == 4 and best.leaves == 1
    best, _ = place(nodes, Mesh(4, 1, 2), Traffic((10**6,), (10**5,), {}, 0))
    assert best.hosts == (("wide", 8),)


def test_a_tensor_group_that_fits_no_host_is_told_and_placed() -> None:
    best, _ = place(grid(2, 2), Mesh(16, 1, 1), Traffic((10**6,), (0,), {}, 0))
    assert best.leaves == 1 and [count for _, count in best.hosts] == [8, 8]
    assert "no host has 16 free slots (the largest has 8)" in best.notices[0]


def test_equal_hosts_stay_in_the_order_of_the_hostfile() -> None:
    nodes = [Node(name, 8) for name in ("z", "b", "a", "c")]
    best, _ = place(nodes, Mesh(8, 1, 3), Traffic((10**6,), (10**3,), {}, 0))
    assert [name for name, _ in best.hosts] == ["z", "b", "a"]


def test_without_room_one_sentence_says_what_is_missing() -> None:
    with pytest.raises(LaunchError, match=r"tp=2 pp=2 dp=2 needs 8 slots, and 3 hosts with 6 free ones were given"):
        place([Node(name, 2) for name in "abc"], Mesh(2, 2, 2), Traffic((1, 1), (1, 1), neighbours(2, 1), 0))
    small = [Node("a", 8, memory_gib=16.0), Node("b", 8, memory_gib=80.0)]
    with pytest.raises(LaunchError, match=r"1 host with 8 free ones .*\(a left out: .* less than 24 GiB of memory\)"):
        place(small, Mesh(1, 1, 16), Traffic((1,), (1,), {}, 0), needs_gib=24.0)
    assert place(small, Mesh(1, 1, 8), Traffic((1,), (1,), {}, 0), needs_gib=24.0)[0].hosts == (("b", 8),)


def test_hosts_that_the_topology_does_not_name_are_far_away() -> None:
    nodes = [Node("new", 8), *grid(leaves=1, per_leaf=2)]
    best, first_fit = place(nodes, Mesh(8, 1, 2), Traffic((10**6,), (10**5,), {}, 0))
    assert "new" not in dict(best.hosts)
    assert "the topology does not name new" in best.notices[0]
    assert first_fit.crossing["no common switch"] > 0 == best.crossing["no common switch"]


@pytest.mark.parametrize("gpus", [(8,), (4, 6, 8)], ids=["alike", "mixed"])
def test_a_thousand_nodes_take_less_than_two_seconds(gpus: tuple[int, ...]) -> None:
    """Seconds of this process, so that others who want the core do not count."""
    sizes = itertools.cycle(gpus)
    nodes = [Node(f"n{i}", next(sizes), switches=(f"l{i // 16}", f"p{i // 128}", "root")) for i in range(1000)]
    chance = random.Random(5)
    mesh = Mesh(4, 8, 125)
    traffic = Traffic((10**12,) * 8, (10**10,) * 8, neighbours(8, 10**9), 10**8)
    seen = set()
    for _ in range(3):
        began = time.process_time()
        best, first_fit = place(chance.sample(nodes, len(nodes)), mesh, traffic)
        assert time.process_time() - began < 2.0
        assert best.cost < 0.9 * first_fit.cost
        seen.add((best.cost, best.leaves, len(best.hosts)))
    assert len(seen) == 1, "the order of the input decided"


def test_a_run_gets_its_hosts_in_rank_order_with_exactly_its_devices() -> None:
    case = Case(tp=2, pp=2, accumulation=2)
    layout = resolve_layout(case.config(), 4, "cpu")
    topology = parse_topology("SwitchName=a Nodes=one,four\nSwitchName=b Nodes=two,three", "t")
    hosts = [Host("one", (0, 1)), Host("two", (1, 3, 5)), Host("three", (0, 1)), Host("four", (0,))]
    chosen, notices = place_hosts(case.config(), layout, hosts, topology)
    assert chosen == (Host("three", (0, 1)), Host("two", (1, 3))) and not notices
