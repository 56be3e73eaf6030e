"""Which hosts an attempt takes, and how many ranks it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.cluster.doctor.findings import Finding, Severity
from launch.cluster.host_selection import Choice, check_memory_of_hosts, choose_hosts, wanted_ranks
from launch.errors import LaunchError
from launch.prediction.memory_check import forecast_memory
from launch.runtime.hostfile import Host
from launch.runtime.local_ranks import MALLOC_TUNABLES
from megalite.config import Config, ConfigError, resolve_layout
from megalite.planner.cost.memory import CPU, Device

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
    with pytest.raises(LaunchError, match="needs 10 ranks, more than the 8 slots on 4 hosts"):
        wanted_ranks(config_of(tiny, 5), FOUR, 0, "cpu")
    with pytest.raises(LaunchError, match="needs 8 ranks, more than the 6 slots on 3 hosts that are not spare"):
        wanted_ranks(config_of(tiny, 4), FOUR, 1, "cpu")
    with pytest.raises(LaunchError, match="needs 2 ranks, more than the 1 slot on 1 host:"):
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
    with pytest.raises(LaunchError, match="fit have 1 slot "):
        choose(config_of(tiny, "auto"), (Host("node1", (0,)),), 8)


def test_a_batch_that_cannot_be_cut_is_the_config_s_mistake(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="global_batch_size 3"):
        choose(config_of(tiny, "auto", batch=3), FOUR, 8)


TUNED = {"GLIBC_TUNABLES": MALLOC_TUNABLES}


@pytest.mark.parametrize(
    ("environment", "has_units", "more", "less"),
    [
        (TUNED, True, CPU, replace(CPU, keeps_freed=False)),  # launch.malloc_tunables, or the user, decides
        ({}, False, replace(CPU, keeps_freed=False, widens_bf16=True), replace(CPU, keeps_freed=False)),
    ],
)
def test_hosts_are_compared_with_what_their_ranks_will_allocate(
    tiny: dict[str, Any], environment: dict[str, str], has_units: bool, more: Device, less: Device
) -> None:
    """By the malloc that ranks will have and the host's own CPU: memory between the two fits one of them alone."""
    tiny["model"] |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    tiny |= {"precision": {"dtype": "bf16"}, "checkpoint": {"background": False}}
    tiny["training"] |= {"global_batch_size": 64, "micro_batch_size": 32, "sequence_length": 128}
    config = Config.model_validate(tiny | {"parallel": {"data_parallel_size": 2}})
    layout, hosts = resolve_layout(config, 2, "cpu"), FOUR[:1]
    most, least = (forecast_memory(config, layout, allocator, 1, 2) for allocator in (more, less))
    assert most is not None and least is not None and most.least > 1.02 * least.least
    facts: dict[str, dict[str, Any]] = {"node1": {"gpus": [], "gpu_memory_bytes": [], "has_bf16_units": has_units}}
    facts["node1"]["memory_bytes"] = round((most.least + least.least) / 2)
    choice = Choice(hosts, layout, ())
    with pytest.raises(LaunchError, match=r"the host has .* for its 2 ranks"):
        check_memory_of_hosts(config, choice, facts, "cpu", environment)
    facts["node1"]["has_bf16_units"] = True
    check_memory_of_hosts(config, choice, facts, "cpu", {})


def test_the_host_with_least_memory_for_each_of_its_ranks_decides(tiny: dict[str, Any]) -> None:
    """Here that is neither the first nor the one with least memory in all."""
    tiny["training"]["global_batch_size"] = 8
    config = Config.model_validate(tiny | {"parallel": {"data_parallel_size": 4}})
    layout = resolve_layout(config, 4, "cpu")
    alone = forecast_memory(config, layout, replace(CPU, keeps_freed=False), 1, 1)
    assert alone is not None
    roomy, crowded = Host("node1", (0,)), Host("node2", (0, 1, 2))
    facts: dict[str, dict[str, Any]] = {
        host.name: {"gpus": [], "gpu_memory_bytes": [], "has_bf16_units": True, "memory_bytes": round(size)}
        for host, size in ((roomy, 1.1 * alone.least), (crowded, 2 * alone.least))
    }
    with pytest.raises(LaunchError, match=r"the host has .* for its 3 ranks"):
        check_memory_of_hosts(config, Choice((roomy, crowded), layout, ()), facts, "cpu", {})


def test_gpus_of_hosts_have_the_memory_that_their_drivers_tell(tiny: dict[str, Any]) -> None:
    """Of the slots that are used; the catalogue, which does not know these, is asked where no driver tells it."""
    config = Config.model_validate(tiny | {"parallel": {"data_parallel_size": 2}})
    choice = Choice((Host("node1", (0, 2)),), resolve_layout(config, 2, "cuda"), ())
    facts: dict[str, dict[str, Any]] = {"node1": {"gpus": ["Xyzzy 9000"] * 3}}
    for sizes, fits in (([2**30] * 3, True), ([2**30, 2**30, 2**16], False), ([2**30, 2**16, None], True), ([], True)):
        facts["node1"]["gpu_memory_bytes"] = sizes
        if fits:
            check_memory_of_hosts(config, choice, facts, "cuda", {})
            continue
        with pytest.raises(LaunchError, match="each GPU has"):
            check_memory_of_hosts(config, choice, facts, "cuda", {})
