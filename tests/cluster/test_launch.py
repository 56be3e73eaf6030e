"""`megalite launch` on real hosts, and what happens to it: whatever is cut, stopped or killed, the run is finished, or
its end is told, nothing is left running anywhere, and every sample is seen once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.errors import INTERRUPTED_CODE, PREEMPTED_CODE
from tests.e2e.conftest import References
from tests.helpers.audit import audit, audit_against, events
from tests.helpers.cluster_runs import MARK, Launched, is_running
from tests.helpers.hosts import Cluster

pytestmark = pytest.mark.slow

STEPS = 300  # enough of them that no fault comes too late
BATCH = 8
LINK_CUT_S = 8.0
PDSH = "pdsh.bin"  # what Debian's /usr/bin/pdsh starts


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages, two replicas; a checkpoint every few steps."""
    tiny["parallel"] = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    tiny["training"] |= {"global_batch_size": BATCH, "steps": STEPS}
    tiny["checkpoint"] = {"interval": 10, "keep_last": 3}
    return tiny


def report(fault: str, seconds: float) -> None:
    """Printed for the table in docs/launch.md: `pytest -s` or -rP shows it."""
    print(f"{fault}: training again after {seconds:.0f} s")


@pytest.mark.timeout(600)
def test_a_run_survives_what_happens_to_ranks_hosts_and_links(
    config: dict[str, Any],
    cluster_of: Callable[..., Cluster],
    references: References,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One run, one fault after the other; at its end it is equal, to the last bit, to a run on one host without any."""
    cluster = cluster_of(3)
    hosts = "node1 slots=2\nnode2 slots=2\nnode3 slots=2\n"
    lock = tmp_path / "extensions" / "fused_adam" / "lock"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parent.parent))
    run = Launched(cluster, tmp_path / "launch", config, hosts, "--spares", "1", "--restarts", "9")
    run.wait_for_steps(15)

    lock.parent.mkdir(parents=True)
    lock.touch()  # as another program leaves it that is killed while it compiles; ranks do not wait for it
    report("kill -9 of a rank", run.recovered(run.send(signal.SIGKILL, rank=3)))
    assert lock.exists(), "it is not theirs"
    report("SIGSTOP of a rank", run.recovered(run.send(signal.SIGSTOP, rank=2)))

    sessions = run.sessions()
    cluster.link("node2", "down")
    time.sleep(LINK_CUT_S)
    cluster.link("node2", "up")
    run.wait_for_steps(5)
    assert run.sessions() == sessions, "a link that is cut for 8 s costs nothing but these 8 s"

    (pdsh,) = is_running(cluster, "head", PDSH)
    os.kill(pdsh, signal.SIGKILL)
    report("kill -9 of pdsh", run.recovered(time.time()))

    cluster.power_off("node2")
    report("power off of a host, spare taken", run.recovered(time.time()))
    assert {process.host for process in run.rank_processes().values()} == {"node1", "node3"}

    cluster.kill_host("node3")
    killed = time.time()
    run.wait_until(lambda: "waiting for hosts: 4 ranks are needed" in run.said())
    cluster.start_host("node2")
    report("a host that dies, no spare, another boots", run.recovered(killed))

    assert run.end() == 0, run.said()
    attempts = run.attempts()
    assert [attempt["exit_code"] for attempt in attempts][-1] == 0 and len(attempts) == 6, attempts
    assert "has been stopped" in attempts[1]["reason"] and "(process " in attempts[1]["reason"]
    assert "left behind by their launcher" in attempts[2]["reason"], attempts[2]
    assert attempts[3]["lost"] == ["node2"] and "node2 has not answered" in attempts[3]["reason"]
    assert [list(attempt["hosts"]) for attempt in attempts[4:]] == [["node1", "node3"], ["node1", "node2"]]
    audit_against(references.of(config, world_size=4).run_dir, run.run_dir, BATCH)


@pytest.mark.timeout(600)
def test_a_run_survives_what_happens_to_its_launcher(
    config: dict[str, Any], cluster_of: Callable[..., Cluster], references: References, tmp_path: Path
) -> None:
    """SIGTERM keeps a checkpoint of the step it was at, SIGKILL as well; and a host lost for good costs no more than
    itself where the layout may shrink."""
    cluster = cluster_of(2)
    config["parallel"]["data_parallel_size"] = "auto"
    config["checkpoint"]["interval"] = 100
    hosts = "node1 slots=2\nnode2 slots=2\n"

    run = Launched(cluster, tmp_path / "first", config, hosts)
    run.wait_for_steps(15)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == PREEMPTED_CODE, run.said()
    assert len(events(run.run_dir, "preempted")) == 1
    saved = run.step()
    assert saved % 100 and (run.run_dir / "checkpoints" / f"step_{saved:08d}").is_dir(), "the checkpoint is kept"

    run = Launched(cluster, tmp_path / "second", config, hosts)
    run.wait_for_steps(5)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(10)
    killed = time.monotonic()
    cluster.assert_no_orphans(MARK, within_s=40)
    print(f"SIGKILL of the launcher: saved and gone after {time.monotonic() - killed:.0f} s")
    while left := [*is_running(cluster, "head", PDSH), *is_running(cluster, "head", "ssh")]:
        assert time.monotonic() < killed + 60, left
        time.sleep(0.1)
    saved = run.step()
    assert saved % 100 and (run.run_dir / "checkpoints" / f"step_{saved:08d}").is_dir(), "ranks saved by themselves"

    run = Launched(cluster, tmp_path / "interrupted", config, hosts)
    run.wait_until(lambda: len(run.rank_processes()) == 4)
    run.process.send_signal(signal.SIGINT)
    assert run.end(30) == INTERRUPTED_CODE, run.said()

    run = Launched(cluster, tmp_path / "third", config, hosts)
    run.wait_for_steps(5)
    cluster.link("node2", "down")  # for good
    report("a link cut for good, going on with half the hosts", run.recovered(time.time()))
    assert {process.host for process in run.rank_processes().values()} == {"node1"}, "node2 has ended its ranks itself"
    assert run.end() == 0, run.said()
    assert "going on with 2 ranks instead of 4" in run.said()
    records = audit(run.run_dir, STEPS, BATCH)
    for record, wanted in zip(records, audit(references.of(config, world_size=4).run_dir, STEPS, BATCH), strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"], rel=2e-5), (
            "another number of replicas adds in another order"
        )
