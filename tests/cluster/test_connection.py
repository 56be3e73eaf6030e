"""An agent on another host: what it answers, whom it guards, and what it does when nobody is there any more."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.resilience.signals import REPEAT_S
from tests.helpers.hosts import Cluster
from tests.helpers.process_table import wait_until

# a rank that notes SIGTERM and ends half a second later, as one that saves; or one that does not listen
RANK = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    open(sys.argv[1] + ".saved", "w").close()
    os._exit(75)
signal.signal(signal.SIGTERM, save if sys.argv[2] == "saves" else signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(120)
"""
# on the head: connects, guards, and does what a test says, with what is printed to hand
PROGRAM = """
import subprocess, sys, time
from launch.cluster.ssh.connection import HostConnection, HostError, connect_all
guard = dict(attempt={attempt!r}, lease_s={lease_s}, private={{"WANDB_API_KEY": "a $secret"}})
"""


class Job:
    """Ranks on node2 that carry an attempt's mark, and commands on the head that have an agent there."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.attempt = cluster, folder, uuid.uuid4().hex

    def start_rank(self, rank: int, behaviour: str) -> Path:
        """Its file, once it is there."""
        path = self.folder / f"rank_{rank}"
        marks = [f"MEGALITE_ATTEMPT={self.attempt}", f"RANK={rank}", "LOCAL_RANK=0"]
        self.cluster.hosts["node2"].popen(["env", *marks, sys.executable, "-c", RANK, str(path), behaviour])
        wait_until(lambda: path.exists() and path.read_text() != "", 30)
        return path

    def head(self, body: str, lease_s: float = 60) -> list[str]:
        """A program for the head."""
        text = PROGRAM.format(attempt=self.attempt, lease_s=lease_s) + textwrap.dedent(body)
        return [sys.executable, "-u", "-c", text]

    def on_head(self, body: str, **limits: float) -> subprocess.Popen[str]:
        """That program, running."""
        return self.cluster.hosts["head"].popen(self.head(body, **limits), stdout=subprocess.PIPE)

    def left(self) -> list[str]:
        return [process.command for process in self.cluster.processes_with("MEGALITE_ATTEMPT", self.attempt)]


@pytest.fixture
def job(two_hosts: Cluster, tmp_path: Path) -> Iterator[Job]:
    made = Job(two_hosts, tmp_path)
    yield made
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not made.left(), 1)


def test_hosts_answer_at_once_and_those_that_cannot_be_reached_are_told_why(job: Job) -> None:
    done = job.cluster.hosts["head"].run(
        job.head("""
        began = time.monotonic()
        made, errors = connect_all(["node1", "nowhere", "node2"])
        print(sorted(made), errors["nowhere"])
        print(made["node1"].ask("clock")["time"] > 0)
        try:
            made["node1"].ask("no such thing")
        except HostError as error:
            print(error)
        """)
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert said[0].startswith("['node1', 'node2'] host nowhere cannot be reached (ssh: Could not resolve hostname")
    assert said[0].endswith("correct its name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config")
    assert said[1] == "True" and said[2].startswith("host node1 cannot do what it was asked (no such thing)")


def test_ranks_are_found_told_and_killed_by_their_mark_alone(job: Job) -> None:
    job.start_rank(2, "saves")
    path = job.start_rank(3, "deaf")
    other = Job(job.cluster, job.folder / "other")
    other.folder.mkdir()
    other.start_rank(2, "deaf")
    done = job.cluster.hosts["head"].run(
        job.head("""
        node = HostConnection("node2")
        name = node.ask("guard", **guard)["private_environment"]
        answer = node.ask("ranks")
        print([one["rank"] for one in answer["ranks"]], [one["state"] for one in answer["ranks"]], answer["processes"])
        subprocess.run(["ssh", "node2", "stat", "-c", "%a", name])
        print(node.ask("signal", number=15)["ranks"])
        time.sleep(1)
        print(node.ask("kill"))
        node.ask("release")
        print(subprocess.run(["ssh", "node2", "ls", name]).returncode)
        """)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[2, 3] ['S', 'S'] 2", "600", "[2, 3]", "{'killed': 1, 'left': []}", "2"]
    assert (job.folder / "rank_2.saved").exists() and not path.with_suffix(".saved").exists()
    assert len(other.left()) == 1, "another run's rank is none of its business"
    other.cluster.hosts["node2"].run(["kill", "-9", (other.folder / "rank_2").read_text()])


def test_when_the_one_who_started_them_is_killed_ranks_save_and_none_is_left(job: Job) -> None:
    paths = job.start_rank(0, "saves"), job.start_rank(1, "deaf")
    head = job.on_head(
        """
        node = HostConnection("node2")
        node.ask("guard", **guard)
        print("on")
        time.sleep(60)
        """,
        lease_s=9,
    )
    assert head.stdout is not None and head.stdout.readline() == "on\n"
    head.send_signal(signal.SIGKILL)
    wait_until(lambda: not job.left(), 30)
    assert paths[0].with_suffix(".saved").exists() and not paths[1].with_suffix(".saved").exists()


def test_a_connection_that_breaks_is_made_anew_and_the_ranks_hear_nothing_of_it(job: Job) -> None:
    """Nor does an order to end them get lost that comes just then."""
    path = job.start_rank(0, "saves")
    head = job.on_head(
        """
        from launch.cluster.attempt import HostMonitor
        connections = {"node2": HostConnection("node2")}
        connections["node2"].ask("guard", **guard)
        with HostMonitor(connections, guard, HostConnection, guard["lease_s"]) as monitor:
            for _ in range(2):
                connections["node2"]._process.kill()
                time.sleep(9)
                assert connections["node2"].is_open and monitor.count_ranks() == 1 and monitor.problem() is None
            connections["node2"]._process.kill()
            print(monitor.kill())
        """,
        lease_s=20,
    )
    assert head.stdout is not None and head.stdout.read() == "[]\n"
    assert not job.left() and not path.with_suffix(".saved").exists()


def test_asked_a_second_time_a_launch_waits_for_no_save(job: Job) -> None:
    job.start_rank(0, "deaf")
    head = job.on_head(
        """
        import os
        from launch.cluster.attempt import HostMonitor, HostsAttempt
        from launch.runtime.processes import StopSignals
        connections = {"node2": HostConnection("node2")}
        connections["node2"].ask("guard", **guard)
        with HostMonitor(connections, guard, HostConnection, guard["lease_s"]) as monitor, StopSignals() as signals:
            print("on")
            ended = HostsAttempt(["sleep", "100"], os.environ, monitor, 90, lambda: None).run(signals)
            print(ended.code, ended.reason)
        """
    )
    assert head.stdout is not None and head.stdout.readline() == "on\n"
    head.send_signal(signal.SIGTERM)
    time.sleep(REPEAT_S + 1)
    assert job.left(), "it has 90 s to save"
    head.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert head.stdout.read() == "143 None\n" and time.monotonic() - asked < 10
    assert not job.left()


def test_a_host_that_is_cut_off_ends_its_ranks_before_it_may_be_taken_for_dead(job: Job) -> None:
    job.start_rank(0, "deaf")
    head = job.on_head(
        """
        node = HostConnection("node2")
        node.ask("guard", **guard)
        print("on")
        while time.monotonic() - node.heard < guard["lease_s"]:
            time.sleep(0.2)
            try:
                node.ask("ranks", timeout_s=0.5)
            except HostError:
                pass
        print("lost")
        """,
        lease_s=4,
    )
    assert head.stdout is not None and head.stdout.readline() == "on\n"
    time.sleep(1)
    assert job.left(), "it lives as long as it is heard"
    cut = time.monotonic()
    job.cluster.link("node2", "down")
    try:
        assert head.stdout.readline() == "lost\n"
        assert 3 < time.monotonic() - cut < 6
        assert not job.left()
    finally:
        job.cluster.link("node2", "up")
    assert head.wait(30) == 0


def test_a_link_that_is_cut_for_less_than_the_lease_harms_nobody(job: Job) -> None:
    job.start_rank(0, "deaf")
    head = job.on_head(
        """
        node = HostConnection("node2")
        node.ask("guard", **guard)
        print("on")
        deadline = time.monotonic() + 12
        while time.monotonic() < deadline:
            time.sleep(0.2)
            node.ask("ranks", timeout_s=guard["lease_s"])
        print(node.ask("kill"))
        """,
        lease_s=10,
    )
    assert head.stdout is not None and head.stdout.readline() == "on\n"
    job.cluster.link("node2", "down")
    time.sleep(3)
    job.cluster.link("node2", "up")
    assert head.stdout.read() == "{'killed': 1, 'left': []}\n"
