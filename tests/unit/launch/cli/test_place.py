"""`megalite place`: a table for people, JSON for programs, a sentence for mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_config
from tests.helpers.commands import command_line

TOPOLOGY = "SwitchName=a Nodes=node[1-2]\nSwitchName=b Nodes=node[3-4]\nSwitchName=top Switches=a,b\n"


@pytest.fixture
def config(tiny: dict[str, Any], tmp_path: Path) -> Path:
    return write_config(
        tmp_path / "c.yaml",
        tiny | {"parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}},
    )


def test_json_says_who_sits_where_and_what_it_costs(config: Path, tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    (tmp_path / "hosts").write_text("".join(f"node{number} slots=2\n" for number in (1, 3, 2, 4)))
    done = command_line(
        "place", str(config), "--hostfile", "hosts", "--topology", "topology.conf", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    ranks = [rank for row in answer["ranks"] for rank in range(row["first_rank"], row["last_rank"] + 1)]
    assert ranks == list(range(8))
    assert [(row["stages"], row["replicas"]) for row in answer["ranks"]] == [
        ([0], [0]),
        ([0], [1]),
        ([1], [0]),
        ([1], [1]),
    ]
    placement, first_fit = answer["placement"], answer["first_fit"]
    assert placement["cost"] <= first_fit["cost"] and placement["hosts"] == 4 and placement["leaves"] == 2
    assert list(placement["bytes_per_step"]) == ["within nodes", "within leaves", "across leaves"]
    assert sum(placement["bytes_per_step"].values()) == sum(first_fit["bytes_per_step"].values())
    assert answer["notices"] == []


def test_names_are_a_hostfile_of_ranks(config: Path, tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(
        "SwitchName=a Nodes=n[1,3]\nSwitchName=b Nodes=n2\nSwitchName=t Switches=a,b"
    )
    done = command_line(
        "place", str(config), "--nodes", "n[1-4]:2", "--topology", "topology.conf", "--names", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()
    assert sorted(names) == sorted(["n1", "n2", "n3", "n4"] * 2) and names[::2] == names[1::2]
    assert (
        names != sorted(names)
        and done.stderr == "megalite: warning: the topology does not name n4: taken to be far from all others\n"
    )


def test_people_get_a_table_and_what_the_hosts_do_not_allow(config: Path) -> None:
    done = command_line("place", str(config), "--nodes", "a[1-3]:1;b[1-3]:2", env={"COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert "8 ranks (tensor 2 x pipeline 2 (schedule chosen at the start) x data 2) on 5 hosts" in done.stdout
    assert "between nodes" in done.stdout and "this placement" in done.stdout
    assert "megalite: 1 of 4 tensor-parallel groups of 2 ranks span several hosts" in done.stdout


def test_replicas_fill_the_hosts_where_they_are_auto(config: Path) -> None:
    words = ["parallel.data_parallel_size=auto", "training.global_batch_size=6", "--nodes", "n[1-6]:2", "--json"]
    answer = json.loads(command_line("place", str(config), *words).stdout)
    assert answer["layout"]["data_parallel_size"] == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "n:8", "--names", "--json"], "give one of them"),
        ([], "say which hosts there are: give either --hostfile or --nodes"),
        (["--nodes", "n:1", "--hostfile", "h"], "--hostfile and --nodes are two ways to say which hosts there are"),
        (["--nodes", "n"], "'n' is not NAMES:GPUS or NAMES:GPUS:GIB"),
        (["--nodes", "n:0"], "'n:0' is not NAMES:GPUS"),
        (["--nodes", "n:1;n:2"], "n is named twice"),
        (["--nodes", "n[1-:2"], "a bracket without its partner"),
        (["--nodes", "n[1-3]:2"], "tp=2 pp=2 dp=2 needs 8 slots, and 3 hosts with 6 free ones were given"),
        (["--nodes", "n[1-3]:2", "--topology", "nowhere"], "topology nowhere cannot be read"),
        (["--hostfile", "nowhere"], "hostfile nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(config: Path, words: list[str], sentence: str) -> None:
    done = command_line("place", str(config), *words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("megalite: error: ") and sentence in done.stderr and done.stderr.count("\n") == 1
