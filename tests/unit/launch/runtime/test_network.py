"""gloo's interface is chosen where the own name stands for loopback, as Debian writes it, and other hosts are there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.runtime.rank_environment import Rank
from launch.runtime.rank_process import INTERFACE, choose_interface, interface_to, is_loopback
from tests.helpers.commands import ROOT

LOOPBACK = {INTERFACE: "lo", "NCCL_SOCKET_IFNAME": "=lo"}
RANK = Rank(0, 0, 4, "Slurm", True, ("node2", 4000))
MACHINE = """
set -e
hostname node1
mount --bind "$HOSTS" /etc/hosts
ip link set lo up
for number in $INTERFACES; do
    ip link add eth$number type veth peer name peer$number
    ip link set peer$number up
    ip addr add 10.78.$number.1/24 dev eth$number
    ip link set eth$number up
done
[ -z "$ROUTE" ] || ip route add default via 10.78.$ROUTE.2
exec "$PYTHON" -c "$PROGRAM"
"""
PROGRAM = """
import json, os
from launch.runtime.rank_process import choose_interface
from launch.runtime.rank_environment import Rank
rank = json.loads(os.environ["RANK_FACTS"])
environment = json.loads(os.environ["GIVEN"])
choose_interface(environment, Rank(**rank | {"master": tuple(rank["master"])}), os.environ["WANTED"])
print(json.dumps(environment))
"""
DEBIAN = "127.0.0.1 localhost\n127.0.1.1 node1\n10.78.0.2 node2\n10.78.1.2 storage2\n"
PLAIN = DEBIAN.replace("127.0.1.1 node1", "10.78.0.1 node1")
UNNAMED = DEBIAN.replace("127.0.1.1 node1\n", "")


def chosen(
    folder: Path,
    rank: Rank = RANK,
    *,
    hosts: str = DEBIAN,
    interfaces: str = "0 1",
    route: str = "",
    given: dict[str, str] | None = None,
    wanted: str = "auto",
) -> dict[str, str]:
    """The environment afterwards, on a machine with its own network, name and hosts file."""
    (folder / "hosts").write_text(hosts)
    own = os.environ | {
        "HOSTS": str(folder / "hosts"),
        "INTERFACES": interfaces,
        "ROUTE": route,
        "PYTHON": sys.executable,
        "PROGRAM": PROGRAM,
        "RANK_FACTS": json.dumps(asdict(rank)),
        "GIVEN": json.dumps(given or {}),
        "WANTED": wanted,
    }
    words = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "sh", "-c", MACHINE]
    done = subprocess.run(words, env=own, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(done.stderr)
    environment: dict[str, str] = json.loads(done.stdout)
    return environment


def interface(*arguments: Any, **options: Any) -> str | None:
    """What GLOO_SOCKET_IFNAME is afterwards."""
    return chosen(*arguments, **options).get(INTERFACE)


@pytest.fixture(scope="module")
def namespaces() -> None:
    words = ["unshare", "--user", "--map-root-user", "--net", "ip", "link", "add", "eth0", "type", "veth"]
    missing = [name for name in ("unshare", "ip", "hostname") if shutil.which(name) is None]
    if missing or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a network of one's own needs unshare, iproute2, and a kernel that allows user namespaces")


@pytest.mark.usefixtures("namespaces")
def test_the_interface_on_the_way_to_the_master(tmp_path: Path) -> None:
    assert interface(tmp_path) == "eth0"
    assert interface(tmp_path, Rank(0, 0, 4, "", True, ("storage2", 4000))) == "eth1"
    assert interface(tmp_path, Rank(0, 0, 4, "", None, ("10.78.1.2", 4000))) == "eth1", "the launcher does not say"
    assert interface(tmp_path, hosts=UNNAMED) == "eth0", "a name that nobody knows: gloo takes loopback then, too"


@pytest.mark.usefixtures("namespaces")
def test_on_the_master_itself(tmp_path: Path) -> None:
    """It may be called by its address, or by its name, which is loopback to itself alone."""
    by_address, by_name = (Rank(0, 0, 4, "", True, (master, 4000)) for master in ("10.78.1.1", "node1"))
    assert interface(tmp_path, by_address) == "eth1"
    assert interface(tmp_path, by_name, route="1") == "eth1", "the way to everybody else"
    assert interface(tmp_path, by_name, interfaces="0") == "eth0", "the only one"
    assert interface(tmp_path, by_name) is None, "nobody can know"
    assert interface(tmp_path, Rank(0, 0, 4, "", None, ("node1", 4000)), interfaces="1") == "eth1", "perhaps several"


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("rank", "options"),
    [
        (RANK, {"hosts": PLAIN}),
        (RANK, {"given": {INTERFACE: "ib0"}}),
        (Rank(0, 0, 4, "", None, ("127.0.0.1", 4000)), {}),
        (Rank(0, 0, 4, "", None, ("localhost", 4000)), {}),
    ],
    ids=["the name is good", "the user has chosen", "on loopback", "on localhost"],
)
def test_nothing_is_chosen_where_that_is_not_needed(tmp_path: Path, rank: Rank, options: dict[str, Any]) -> None:
    before = options.get("given", {}).get(INTERFACE)
    assert interface(tmp_path, rank, **options) == before


def test_this_machine() -> None:
    assert is_loopback("localhost") and is_loopback("127.0.1.1") and not is_loopback("192.0.2.1")
    name = interface_to("127.0.0.1")
    assert name is None or Path("/sys/class/net", name).exists()
    environment: dict[str, str] = {}
    choose_interface(environment, Rank(1, 1, 2, "torchrun", False, ("127.0.0.1", 4000)))
    assert environment == LOOPBACK


@pytest.mark.parametrize("rank", [Rank(0, 0, 4, "deepspeed", False, ("node2", 4000)), Rank(0, 0, 1, "Slurm", True)])
def test_ranks_of_one_host_stay_on_loopback(rank: Rank) -> None:
    """Also where a script has set MASTER_ADDR to the host's name, unless torchrun waits there."""
    given = {"MASTER_ADDR": "node2"}
    environment = dict(given)
    choose_interface(environment, rank)
    assert environment == LOOPBACK | {"MASTER_ADDR": "127.0.0.1"}
    environment = given | {"TORCHELASTIC_USE_AGENT_STORE": "True", "NCCL_SOCKET_IFNAME": "eth1"}
    choose_interface(environment, rank, "eth7")
    assert environment["MASTER_ADDR"] == "node2" and environment["NCCL_SOCKET_IFNAME"] == "eth1"


@pytest.mark.usefixtures("namespaces")
def test_an_interface_by_name(tmp_path: Path) -> None:
    """For gloo, NCCL, and the address of rank 0, unless other hosts know that one already."""
    both = {INTERFACE: "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    elsewhere = Rank(1, 0, 4, "Slurm", True, ("node2", 4000))
    assert chosen(tmp_path, elsewhere, wanted="eth1") == both
    assert chosen(tmp_path, elsewhere, wanted="eth1", given={INTERFACE: "ib0"}) == both | {INTERFACE: "ib0"}
    at_own_name = Rank(1, 1, 4, "", True, ("node1", 4000))
    assert chosen(tmp_path, at_own_name, wanted="eth1") == both | {"MASTER_ADDR": "10.78.1.1"}
    behind_nat = Rank(0, 0, 4, "", True, ("198.51.100.7", 4000))
    assert chosen(tmp_path, behind_nat, wanted="eth1") == both | {"MASTER_ADDR": "10.78.1.1"}
    assert chosen(tmp_path, Rank(0, 0, 4, "", True, ("10.78.1.1", 4000)), wanted="eth1") == both
    with pytest.raises(LaunchError, match=r"launch.interface is ib7, and node1 has none of this name: it has lo, eth0"):
        chosen(tmp_path, wanted="ib7")
    with pytest.raises(LaunchError, match=r"launch.interface is eth1, but 10.78.0.1, where the ranks meet, is on eth0"):
        chosen(tmp_path, Rank(0, 0, 4, "", True, ("10.78.0.1", 4000)), wanted="eth1")


@pytest.mark.usefixtures("namespaces")
def test_a_name_of_this_host_becomes_its_only_outer_address(tmp_path: Path) -> None:
    """For all ranks of the host. If it has several, other hosts may take the name for any of them."""
    for number in (0, 1):
        by_name = Rank(number, number, 4, "Slurm", True, ("node1", 4000))
        address = {"MASTER_ADDR": "10.78.0.1"}
        assert chosen(tmp_path, by_name, interfaces="0") == {INTERFACE: "eth0"} | address, "Debian's own name"
        assert chosen(tmp_path, by_name, hosts=PLAIN, interfaces="0") == address
        assert chosen(tmp_path, by_name) == {}, "then all interfaces are open"
        assert chosen(tmp_path, by_name, hosts=PLAIN) == {}
        several = DEBIAN.replace("127.0.1.1 node1", "10.78.1.1 node1\n10.78.0.1 node1")
        both = {INTERFACE: "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
        assert chosen(tmp_path, by_name, hosts=several, wanted="eth0") == both | address
