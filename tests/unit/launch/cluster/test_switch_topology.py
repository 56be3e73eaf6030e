"""Slurm's topology.conf and what scontrol prints of it: the same switches above the same hosts, and mistakes told."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cluster.switch_topology import expand_hosts, parse_topology, read_topology
from launch.errors import LaunchError

WRITTEN = """
# two leaves
SwitchName=leaf1 Nodes=node[1-2],gpu[01-02] LinkSpeed=100
switchname=leaf2 \\
    nodes=node[3,5]   # not 4
SwitchName=spine Switches=leaf[1-2]
"""
PRINTED = """SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[01-02],node[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node[3,5]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=gpu[01-02],node[1-3,5] Switches=leaf[1-2]
"""


@pytest.mark.parametrize("text", [WRITTEN, PRINTED], ids=["topology.conf", "scontrol show topology"])
def test_switches_above_each_host(text: str) -> None:
    topology = parse_topology(text, "t")
    assert topology.path("gpu02") == topology.path("node1") == ("leaf1", "spine")
    assert topology.path("node5.cluster.example") == ("leaf2", "spine")
    assert topology.path("node4") == ()
    assert len(topology.paths) == 6


def test_blocks_are_leaves() -> None:
    text = "BlockName=b1 Nodes=node[1-2]\nBlockName=b2 Nodes=node[3-4]\nBlockSizes=2,4\n"
    assert parse_topology(text, "t").path("node3") == ("b2",)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[1-3,7],x", ["n1", "n2", "n3", "n7", "x"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_host_lists(words: str, names: list[str]) -> None:
    assert list(expand_hosts(words, "t")) == names


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "t names no switch"),
        ("\nSwitchName=a", "t:2: a has neither Nodes= nor Switches="),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "t:2: a is already in t:1"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n[1-2]", "t:2: host n1 is below a and b"),
        ("SwitchName=s Switches=a", "t:1: switch a below s is not in the file"),
        ("SwitchName=a Nodes=n\nSwitchName=s Switches=a\nSwitchName=t Switches=a", "t:3: switch a is below s and t"),
        ("SwitchName=s Switches=t\nSwitchName=t Switches=s", "is above itself"),
        ("SwitchName=a Nodes=n[1-", "t:1: 'n[1-' has a bracket without its partner"),
        ("SwitchName=a Nodes=n1]", "a bracket without its partner"),
        ("SwitchName=a Nodes=n[1-x]", "t:1: '1-x' in 'n[1-x]' is not a number or a range"),
        ("SwitchName=a Nodes=n[4-1]", "is not a range from small to large"),
        ("SwitchName=a Nodes=n[1-99999999]", "is longer than any cluster: give at most 100,000 hosts"),
        ("SwitchName=a Nodes=r[1-1000]n[1-1000]", "'r[1-1000]n[1-1000]' is longer than any cluster"),
        ("SwitchName=a Nodes", "t:1: 'Nodes' is not NAME=VALUE"),
        ("node1 slots=8", "t:1: 'node1' is not NAME=VALUE"),
        ("Nodes=n1", "t:1: 'Nodes=n1' is not SwitchName=NAME"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(LaunchError) as told:
        parse_topology(text, "t")
    assert sentence in str(told.value) and "\n" not in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot be read: No such file or directory: give Slurm's topology"):
        read_topology(tmp_path / "topology.conf")
