"""The hosts that other tests stand on: they are separate where real ones are, fail as told, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_supervise import MARK, marked
from tests.helpers import cluster_machine as machine
from tests.helpers import debian
from tests.helpers.commands import ROOT
from tests.helpers.hosts import Cluster, HostCommand
from tests.helpers.process_table import lives, wait_until

TOO_LONG_S = 0.5  # for what takes a few milliseconds where it works at all
SOON_S = 20.0
ALONE = """
import sys
from tests.helpers.hosts import Cluster
with Cluster(2) as cluster:
    stopped = cluster.hosts["node1"].popen(["sleep", "1000"])
    stopped.send_signal(19)
    print(cluster.hosts["node2"].run(["hostname"]).stdout.strip(), stopped.inside, flush=True)
    if sys.argv[1] == "wait":
        stopped.wait()
"""


def connects(cluster: Cluster, to: str, by: str = "head") -> bool:
    """Whether a connection to a host's sshd comes about at once."""
    attempt = ["timeout", str(TOO_LONG_S), "bash", "-c", f"exec 3<> /dev/tcp/{to}/22"]
    return cluster.hosts[by].run(attempt).returncode == 0


def echo_over_ssh(cluster: Cluster, to: str) -> HostCommand:
    """A connection from `head` that stands: it answers each line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 1}
    echo = cluster.hosts["head"].popen(["ssh", to, "cat"], **pipes)
    assert answer(echo, "first") == "first"
    return echo


def answer(echo: HostCommand, line: str) -> str:
    assert echo.stdin is not None and echo.stdout is not None
    echo.stdin.write(f"{line}\n")
    echo.stdin.flush()
    return echo.stdout.readline().strip()


def machine_state() -> dict[str, str | list[str]]:
    """What a cluster must leave as it is."""
    ssh = Path("~root/.ssh").expanduser()
    return {
        "mounts": Path("/proc/self/mounts").read_text(),
        "interfaces": sorted(str(path) for path in Path("/sys/class/net").iterdir()),
        "hosts": Path("/etc/hosts").read_text(),
        "ssh": sorted(f"{path} {path.stat().st_mtime_ns}" for path in (ssh, *ssh.rglob("*")) if path.exists()),
        "host keys": sorted(f"{path} {path.stat().st_mtime_ns}" for path in Path("/etc/ssh").rglob("*")),
    }


def test_hosts_reach_one_another_by_name(two_hosts: Cluster) -> None:
    for here, there in (("head", "node1"), ("node1", "node2"), ("node2", "head")):
        said = two_hosts.hosts[here].run(["ssh", there, "hostname; hostname -I"], check=True).stdout.split()
        assert said == [there, two_hosts.hosts[there].ip]


def test_pdsh_runs_on_all_hosts_and_tells_how_it_went(two_hosts: Cluster) -> None:
    everywhere = ["env", "PDSH_RCMD_TYPE=ssh", "pdsh", "-S", "-w", ",".join(two_hosts.names)]
    result = two_hosts.hosts["head"].run([*everywhere, "hostname; test $(hostname) = node1 || exit 75"])
    assert sorted(result.stdout.splitlines()) == ["node1: node1", "node2: node2"]
    assert result.returncode == 75


def test_hosts_are_separate_where_real_ones_are(two_hosts: Cluster, tmp_path: Path) -> None:
    node1, node2 = two_hosts.hosts["node1"], two_hosts.hosts["node2"]
    mark = uuid.uuid4().hex
    (shared := tmp_path / "shared").write_text("the same on all hosts")
    with node1.popen(["sleep", "1000"], env=os.environ | {MARK: mark}) as sleeper:
        wait_until(lambda: node1.run(["pgrep", "sleep"]).stdout != "", SOON_S)
        assert node2.run(["pgrep", "sleep"]).stdout == ""
        assert sleeper.inside in node1.pids() and sleeper.inside not in node2.pids()
        assert node2.run(["pkill", "-f", "sleep"]).returncode == 1  # none was there to be killed
        sleeper.kill()
    node1.run(["touch", f"/dev/shm/{mark}", "/run/one"], check=True)
    assert not Path("/dev/shm", mark).exists() and not Path("/run/one").exists()
    node1.run(["ipcmk", "--shmem", "1000"], check=True)
    assert node2.run(["ls", "/dev/shm", "/run/one"]).stdout == "/dev/shm:\n"
    assert "0x" not in node2.run(["ipcs", "--shmems"], check=True).stdout
    assert node2.run(["cat", shared], check=True).stdout == shared.read_text()
    assert node2.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]


def test_a_private_directory_is_not_shared_not_even_over_ssh(two_hosts: Cluster, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/old").touch()
    two_hosts.private_directory("node1", tmp_path / "run")
    two_hosts.hosts["head"].run(["ssh", "node1", f"touch {tmp_path}/run/new"], check=True)
    seen = {name: host.run(["ls", tmp_path / "run"]).stdout.split() for name, host in two_hosts.hosts.items()}
    assert seen == {"node1": ["new"], "node2": ["old"], "head": ["old"]}


def test_signals_reach_the_command_itself(two_hosts: Cluster) -> None:
    trap = "trap 'echo asked; exit 75' TERM; echo ready; while :; do sleep 0.01; done"
    with two_hosts.hosts["node1"].popen(["bash", "-c", trap], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None and command.stdout.readline() == "ready\n"
        for number in (*[signal.SIGSTOP, signal.SIGCONT] * 20, signal.SIGTERM):
            command.send_signal(number)
        assert command.wait(SOON_S) == 75 and command.stdout.read() == "asked\n"
    with two_hosts.hosts["node1"].popen(["sleep", "1000"]) as command:
        command.send_signal(signal.SIGSTOP)
        command.kill()
        assert command.wait(SOON_S) == -signal.SIGKILL and command.inside is None


def test_a_command_that_takes_too_long_is_ended(two_hosts: Cluster) -> None:
    mark = uuid.uuid4().hex
    with pytest.raises(subprocess.TimeoutExpired):
        two_hosts.hosts["node1"].run(["sleep", "1000"], timeout=0.1, env=os.environ | {MARK: mark})
    two_hosts.assert_no_orphans(MARK, mark, within_s=SOON_S)


def test_orphans_are_found_on_every_host(two_hosts: Cluster) -> None:
    mark = uuid.uuid4().hex
    orphan = f"{MARK}={mark} setsid sleep 1000 > /dev/null 2>&1 < /dev/null &"
    two_hosts.hosts["head"].run(["ssh", "node2", orphan], check=True)
    # on a busy machine the shell is still there for a moment when ssh has returned
    wait_until(lambda: [each.command for each in two_hosts.processes_with(MARK, mark)] == ["sleep 1000"], SOON_S)
    (found,) = two_hosts.processes_with(MARK, mark)
    assert found.host == "node2"
    assert found in two_hosts.processes_with(MARK)
    with pytest.raises(AssertionError, match="sleep 1000"):
        two_hosts.assert_no_orphans(MARK, mark)
    os.kill(found.pid, signal.SIGKILL)
    two_hosts.assert_no_orphans(MARK, mark, within_s=SOON_S)


def test_a_connection_survives_a_cable_that_is_put_back(cluster_of: Callable[..., Cluster]) -> None:
    cluster = cluster_of(2)
    with echo_over_ssh(cluster, "node2") as echo:
        cluster.link("node2", "down")
        assert not connects(cluster, "node2") and connects(cluster, "node1")
        cluster.link("node2", "up")
        wait_until(lambda: connects(cluster, "node2"), SOON_S)
        assert answer(echo, "second") == "second"
        echo.kill()


def test_a_throttled_host_sends_slowly_and_loses_nothing(cluster_of: Callable[..., Cluster]) -> None:
    cluster = cluster_of(1)
    cluster.throttle("node1", bytes_per_s=200_000)
    began = time.monotonic()
    read = cluster.hosts["head"].run(["bash", "-c", "ssh node1 head -c 500000 /dev/zero | wc -c"], check=True)
    assert read.stdout.strip() == "500000" and time.monotonic() - began > 2.0


def test_a_killed_host_closes_its_connections_and_one_without_power_does_not(
    cluster_of: Callable[..., Cluster],
) -> None:
    cluster = cluster_of(2)
    with echo_over_ssh(cluster, "node1") as to_killed, echo_over_ssh(cluster, "node2") as to_dark:
        stopped = cluster.hosts["node1"].popen(["sleep", "1000"])
        stopped.send_signal(signal.SIGSTOP)
        cluster.kill_host("node1")
        cluster.power_off("node2")
        assert not cluster.hosts["node1"].is_on and cluster.hosts["node1"].pids() == []
        assert to_killed.wait(SOON_S) == 255
        with pytest.raises(subprocess.TimeoutExpired):
            to_dark.wait(TOO_LONG_S)
        assert not connects(cluster, "node1") and not connects(cluster, "node2")
        to_dark.kill()


def test_a_host_boots_again_with_nothing_of_before(cluster_of: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = cluster_of(1)
    cluster.private_directory("node1", tmp_path)
    cluster.hosts["node1"].run(["touch", tmp_path / "lost"], check=True)
    for end in (cluster.power_off, cluster.kill_host):
        end("node1")
        cluster.start_host("node1")
        assert (
            cluster.hosts["head"].run(["ssh", "node1", "ls", tmp_path, "/dev/shm"], check=True).stdout.count("\n") == 3
        )


def test_a_host_may_be_off_from_the_start(cluster_of: Callable[..., Cluster]) -> None:
    cluster = cluster_of(2, off=["node2"])
    assert connects(cluster, "node1") and not connects(cluster, "node2")
    cluster.start_host("node2")
    assert connects(cluster, "node2")


def test_names_may_resolve_as_debians_installer_leaves_them(cluster_of: Callable[..., Cluster]) -> None:
    cluster = cluster_of(names=["first", "a-rather-long-name-of-a-host"], debian_hosts=["first"])

    def address(of: str, by: str) -> str:
        return cluster.hosts[by].run(["getent", "ahostsv4", of], check=True).stdout.split()[0]

    assert address("first", by="first") == "127.0.1.1"
    assert address("first", by="head") == cluster.hosts["first"].ip
    last = cluster.names[-1]
    assert address(last, by=last) == cluster.hosts[last].ip
    cluster.hosts_file(last).write_text("10.77.0.99 first\n")
    assert address("first", by=last) == "10.77.0.99"


def test_clusters_do_not_meet_and_leave_the_machine_as_it_was(can_make_hosts: None) -> None:
    before = machine_state()
    with Cluster(1) as one, Cluster(1) as other:
        assert one.hosts["node1"].ip == other.hosts["node1"].ip
        pids = {host.pid for cluster in (one, other) for host in cluster.hosts.values()}
        other.hosts["node1"].run(["touch", "/run/other"], check=True)
        assert one.hosts["head"].run(["ssh", "node1", "ls /run/other"]).returncode == 2
        assert other.hosts["head"].run(["ssh", "node1", "ls /run/other"]).returncode == 0
        other.power_off("node1")
        assert connects(one, "node1")
        assert machine_state() == before
    assert machine_state() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("stdin", ["closed", "empty"])
def test_a_cluster_needs_no_input(can_make_hosts: None, stdin: str) -> None:
    script = 'exec "$@" <&-' if stdin == "closed" else 'exec "$@" < /dev/null'
    command = ["sh", "-c", script, "sh", sys.executable, "-c", ALONE, "end"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SOON_S)
    assert done.stdout.startswith("node2 "), done


def test_hosts_die_with_the_process_that_made_them(can_make_hosts: None) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", ALONE, "wait"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {MARK: mark}, stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout is not None and maker.stdout.readline().startswith("node2 ")
            its = psutil.Process(maker.pid).children(recursive=True)
        finally:
            maker.kill()
    assert len(its) >= 9, its  # the switch, three hosts and what keeps each, a command and what waits for it
    wait_until(lambda: not any(lives(process.pid) for process in its), SOON_S)
    assert not marked(mark)


def test_a_cluster_is_there_in_a_second(can_make_hosts: None) -> None:
    """The best of three: others work on this machine as well."""
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        with Cluster(2):
            seconds.append(time.monotonic() - began)
    assert min(seconds) < 1


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "why_no_namespaces", lambda: None)
    monkeypatch.setattr(debian, "PATH", str(tmp_path))
    reason = machine.why_no_hosts("slurmd")
    assert reason is not None and "sshd" in reason and "slurmd" in reason and "make test-cluster" in reason


def test_tests_are_skipped_loudly_where_namespaces_are_not_allowed(can_make_hosts: None) -> None:
    """Root without the right to mount is what most containers give."""
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "by_name", __file__]
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", *tests], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "1 skipped" in done.stdout, done.stdout
    assert "NO HOSTS HERE: no namespaces may be made (unshare" in done.stdout and "make test-cluster" in done.stdout
