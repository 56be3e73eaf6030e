"""Which hosts an attempt takes, and how many ranks it has."""

from __future__ import annotations

from typing import Any

import pytest

from launch.cluster.doctor.findings import Finding, Severity
from launch.cluster.host_selection import Choice, choose_hosts, wanted_ranks
from launch.errors import LaunchError
from launch.runtime.hostfile import Host
from megalite.config import Config, ConfigError

FOUR = tuple(Host(f"node{number}", (0, 1)) for number in range(1, 5))
DEAD = Finding(
    "reachable", Severity.FAIL, ("node2",), "host node2 cannot be reached (timed out)", "look whether it is up"
)


def config_of(tiny: dict[str, Any], data: int | str, batch: int = 24) -> Config:
    tiny["parallel"] = {"pipeline_parallel_size": 2, "data_parallel_size": data}
    tiny["training"] |= {"global_batch_size": batch, "micro_batch_size": 1}
    return Config.model_validate(tiny)


def choose(config: Config, fit: tuple[Host, ...], wanted: int, **changes: Any) -> Choice:
    options: dict[str, Any] = {"may_shrink": True, "spares": 0, "topology": None, "why_not": [DEAD]}
    return choose_hosts(config, fit, "cpu", wanted=wanted, **options | changes)


def names(choice: Choice) -> list[tuple[str, int]]:
    return [(host.name, host.slots) for host in choice.hosts]


@pytest.mark.parametrize(
    ("data", "spares", "slots", "wanted"),
    [
        ("auto", 0, (2, 2, 2, 2), 8),
        ("auto", 1, (2, 2, 2, 2), 6),
        ("auto", 0, (3, 2), 4),
        (2, 0, (2, 2, 2, 2), 4),
        (2, 2, (2, 2, 9, 9), 4),
    ],
)
def test_how_many_ranks(
    tiny: dict[str, Any], data: int | str, spares: int, slots: tuple[int, ...], wanted: int
) -> None:
    hosts = [Host(f"node{number}", tuple(range(count))) for number, count in enumerate(slots)]
    assert wanted_ranks(config_of(tiny, data), hosts, spares, "cpu") == wanted


def test_too_few_slots(tiny: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match="needs 10 ranks, and there are 8 slots on 4 hosts"):
        wanted_ranks(config_of(tiny, 5), FOUR, 0, "cpu")
    with pytest.raises(LaunchError, match="needs 8 ranks, and there are 6 slots on 3 hosts that are not spare"):
        wanted_ranks(config_of(tiny, 4), FOUR, 1, "cpu")
    with pytest.raises(LaunchError, match="needs 2 ranks, and there are 1 slots on 1 host:"):
        wanted_ranks(config_of(tiny, "auto"), [Host("a", (0,))], 0, "cpu")


def test_a_spare_is_taken_only_for_a_host_that_is_lost(tiny: dict[str, Any]) -> None:
    config = config_of(tiny, "auto")
    assert names(choose(config, FOUR, 6, spares=1)) == [("node1", 2), ("node2", 2), ("node3", 2)]
    left = FOUR[:1] + FOUR[2:]
    assert names(choose(config, left, 6, spares=1)) == [("node1", 2), ("node3", 2), ("node4", 2)]


def test_fewer_replicas_where_no_spare_is_left(tiny: dict[str, Any]) -> None:
    config = config_of(tiny, "auto")
    choice = choose(config, FOUR[2:], 8)
    assert names(choice) == [("node3", 2), ("node4", 2)]
    assert choice.notices[0] == "going on with 4 ranks instead of 8: data parallelism is auto"
    assert names(choose(config_of(tiny, "auto", batch=4), FOUR[1:], 8)) == [("node2", 2), ("node3", 2)], "4 % 3"
    assert names(choose(config, (Host("node1", (0, 1)), Host("node2", (3,))), 8)) == [("node1", 2)], (
        "a rank has no partner"
    )


@pytest.mark.parametrize(("data", "may_shrink"), [(4, True), ("auto", False)])
def test_what_may_not_shrink_says_what_is_missing(tiny: dict[str, Any], data: int | str, may_shrink: bool) -> None:
    with pytest.raises(LaunchError) as error:
        choose(config_of(tiny, data), FOUR[:3], 8, may_shrink=may_shrink)
    assert str(error.value) == (
        "8 ranks are needed, and hosts that are fit have 6 slots (host node2 cannot be reached (timed out): look "
        "whether it is up): mend them, leave them out with --exclude, or name others in the hostfile"
    )
    with pytest.raises(LaunchError, match="fit have 1 slots"):
        choose(config_of(tiny, "auto"), (Host("node1", (0,)),), 8)


def test_a_batch_that_cannot_be_cut_is_the_config_s_mistake(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="global_batch_size 3"):
        choose(config_of(tiny, "auto", batch=3), FOUR, 8)
