"""`megalite slurm` on a real Slurm: whatever happens to ranks, job or hosts, the run is finished or its end is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.errors import PREEMPTED_CODE, USER_ERROR_CODE
from tests.conftest import write_config
from tests.e2e.conftest import References
from tests.helpers.audit import audit, audit_against, complete, events, steps_done
from tests.helpers.cluster_machine import why_no_hosts
from tests.helpers.commands import BIN
from tests.helpers.hosts import HostedProcess
from tests.helpers.slurm_cluster import PROGRAMS_NEEDED, SlurmCluster

pytestmark = pytest.mark.slow

STEPS, BATCH = 400, 4  # enough of them that no fault comes too late
ENDLESS = 100_000
START_S = 90.0  # until ranks train: imports, on cores that others use as well
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


@pytest.fixture(scope="module", autouse=True)
def slurm_is_installed() -> None:
    if reason := why_no_hosts(*PROGRAMS_NEEDED):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Two nodes for tests that leave them whole, and no job on them."""
    with SlurmCluster(2) as cluster:
        yield cluster


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages, one per host; a checkpoint every few steps."""
    tiny["training"] |= {"global_batch_size": BATCH, "steps": STEPS}
    tiny["parallel"] = {"pipeline_parallel_size": 2}
    return tiny | {"checkpoint": {"interval": 10, "keep_last": 3}, "monitor": {"plot": False, "report": False}}


class Submitted:
    """A run that `megalite slurm --submit` has handed in."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, config: dict[str, Any], *options: str, nodes: int = 2
    ) -> None:
        self.slurm, self.run_dir = slurm, Path(config["run_dir"])
        path = write_config(folder / "config.yaml", config)
        words = ["slurm", path, "--nodes", str(nodes), "--gpus-per-node", "0", "--submit", "--json", *options]
        answer = json.loads(slurm.run(BIN / "megalite", *words, OMP_NUM_THREADS="1"))
        self.number = answer["job"]
        self._log = Path(answer["log"].replace("%j", self.number))

    def facts(self) -> dict[str, str]:
        return self.slurm.job(self.number)

    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def step(self) -> int:
        with contextlib.suppress(ValueError):
            return steps_done(self.run_dir)
        return 0

    def sessions(self) -> int:
        return len(events(self.run_dir, "started")) if (self.run_dir / "events.jsonl").exists() else 0

    def until(self, condition: Callable[[], bool], within_s: float = START_S) -> None:
        """Returns once it holds; fails where the job ends before."""
        deadline = time.monotonic() + within_s
        while not condition():
            facts = self.facts()
            assert facts["JobState"] not in ENDED and time.monotonic() < deadline, f"{facts}\n{self.said()}"
            time.sleep(0.1)

    def trains(self, session: int, after: str | None = None) -> None:
        """Returns once it has done some steps of this session, from 1; prints how long that took after a fault."""
        began = time.monotonic()
        self.until(lambda: self.sessions() == session)
        if after is not None:
            print(f"{after}: ready to train again after {time.monotonic() - began:.0f} s")  # pytest -rP shows it
        before = self.step()
        self.until(lambda: self.step() >= before + 15)

    def ranks(self) -> dict[str, HostedProcess]:
        """Host -> its rank."""
        found = self.slurm.cluster.processes_with("SLURM_JOB_ID", self.number)
        ranks = [one for one in found if "-m launch.train" in one.command and "-m torch" not in one.command]
        return {
            one.host: one
            for one in ranks
            if "srun" not in one.command and "launch.supervision.reaper" not in one.command
        }

    def end(self, within_s: float = 2 * START_S) -> str:
        """Its last state; nothing of it may be left on any host."""
        deadline = time.monotonic() + within_s
        while (state := self.facts()["JobState"]) not in ENDED:
            assert time.monotonic() < deadline, f"{self.facts()}\n{self.said()}"
            time.sleep(0.1)
        self.slurm.cluster.assert_no_orphans("SLURM_JOB_ID", self.number, within_s=5)
        return state

    def codes(self) -> list[int]:
        """Exit codes of its attempts."""
        lines = (self.run_dir / "attempts.jsonl").read_text().splitlines()
        return [json.loads(line)["exit_code"] for line in lines]


def listens(pid: int) -> bool:
    """Whether a rank has come as far as hearing SIGUSR1; its long imports follow."""
    with contextlib.suppress(OSError, IndexError):
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def test_a_run_survives_killed_ranks_a_killed_srun_and_preemption(
    slurm: SlurmCluster, config: dict[str, Any], references: References, tmp_path: Path
) -> None:
    """One job, one fault after the other; at its end equal, to the last bit, to a run on one host without any."""
    run = Submitted(slurm, tmp_path, config, "--time", "1:00:00")

    run.trains(session=1)
    os.kill(run.ranks()["node2"].pid, signal.SIGKILL)
    run.trains(session=2, after="kill -9 of a rank")

    ranks = {one.pid for one in run.ranks().values()}
    slurm.cluster.hosts["node1"].run(["pkill", "-KILL", "-x", "srun"], check=True)
    run.trains(session=3, after="kill -9 of srun")
    assert not ranks & {one.pid for one in run.ranks().values()}, "the step that lost its srun has ended"
    assert run.facts()["Restarts"] == "0", "so far all happened within one start of the job"

    slurm.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    run.until(lambda: run.facts()["Restarts"] == "1")
    (preempted,) = events(run.run_dir, "preempted")
    assert preempted and complete(run.run_dir / "checkpoints") >= {run.step()}, "saved before it went"
    run.trains(session=4, after="preempted and requeued")

    assert run.end() == "COMPLETED", run.said()
    assert run.facts()["ExitCode"] == "0:0"
    codes = run.codes()
    assert codes[0] == 137 and codes[-2:] == [PREEMPTED_CODE, 0] and len(codes) == 4, codes
    assert "goes back to the queue: asked to end, and saved" in run.said()
    assert run.said().count("ranks in Slurm's order of hosts, which tells no topology\n") == 2, "once per start"
    audit_against(references.of(config).run_dir, run.run_dir, BATCH)


def test_the_time_limit_saves_and_requeues_and_scancel_saves_and_ends(
    slurm: SlurmCluster, config: dict[str, Any], tmp_path: Path
) -> None:
    """With torchrun between Slurm and the ranks: it must bear all that ranks without it get, and not end them."""
    config["training"]["steps"] = ENDLESS
    options = ["--time", "1:00:00", "--signal-before", "600", "--spawner", "torchrun"]
    run = Submitted(slurm, tmp_path, config, *options)
    run.trains(session=1)
    slurm.run("scontrol", "update", f"JobId={run.number}", "TimeLimit=10")  # Slurm looks every half minute
    run.until(lambda: run.facts()["Restarts"] == "1")
    assert "preempted: signal SIGUSR1" in run.said() and run.codes() == [PREEMPTED_CODE]
    slurm.run("scontrol", "update", f"JobId={run.number}", "TimeLimit=60")
    saved = run.step()

    run.trains(session=2)
    assert events(run.run_dir, "started")[1]["step"] == saved, "it goes on where it was asked to end"
    slurm.run("scancel", run.number)
    assert run.end() == "CANCELLED"
    assert "preempted: signal SIGTERM" in run.said() and "was cancelled, or " in run.said()
    assert run.codes() == [PREEMPTED_CODE] * 2 and max(complete(run.run_dir / "checkpoints")) == run.step()
    audit(run.run_dir, run.step(), BATCH)
    time.sleep(7)  # longer than a requeued job waits
    assert run.facts()["JobState"] == "CANCELLED" and run.facts()["Restarts"] == "1"


def test_a_host_without_power_is_replaced(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    with SlurmCluster(3, kill_wait_s=5) as slurm:
        run = Submitted(slurm, tmp_path, config)
        run.trains(session=1)
        assert run.facts()["NodeList"] == "node[1-2]"
        slurm.cluster.power_off("node2")
        began = time.monotonic()
        run.until(lambda: run.facts()["Restarts"] == "1")
        print(f"Slurm noticed the power off after {time.monotonic() - began:.0f} s")
        run.trains(session=2, after="from then on")
        assert run.facts()["NodeList"] == "node[1,3]"
        assert run.end() == "COMPLETED", run.said()
    audit_against(references.of(config).run_dir, run.run_dir, BATCH)


@pytest.fixture(scope="module")
def two_switches() -> Iterator[SlurmCluster]:
    """Three nodes, the first one alone on its switch, and no job on them."""
    topology = "SwitchName=a Nodes=node[2-3]\nSwitchName=b Nodes=node1\nSwitchName=top Switches=a,b\n"
    with SlurmCluster(3, topology=topology) as cluster:
        yield cluster


@pytest.mark.parametrize("spawner", ["srun", "torchrun"])
def test_ranks_go_where_the_topology_has_them_near(
    two_switches: SlurmCluster, config: dict[str, Any], spawner: str, tmp_path: Path
) -> None:
    """The first and the last of three stages share weights: they are to be on one switch."""
    config["parallel"] = {"pipeline_parallel_size": 3}
    config["model"] |= {"tie_word_embeddings": True}
    run = Submitted(two_switches, tmp_path, config, "--spawner", spawner, nodes=3)
    run.trains(session=1)
    beats = [json.loads(path.read_text()) for path in sorted((run.run_dir / ".ranks").glob("beat_*.json"))]
    assert [(beat["rank"], beat["host"]) for beat in beats] == [(0, "node2"), (1, "node1"), (2, "node3")]
    two_switches.run("scancel", run.number)
    assert run.end() == "CANCELLED"
    assert "in this order of hosts: node2 node1 node3\n" in run.said()


def test_what_nobody_wants_is_not_done_again(slurm: SlurmCluster, config: dict[str, Any], tmp_path: Path) -> None:
    """A mistake that ranks find, though srun tells the highest exit code of all; a limit that leaves no step; and a
    job whose user says so."""
    config["run_dir"] = str(tmp_path / """a "run", 100% of 'it' #1""")
    run = Submitted(slurm, tmp_path, config)
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("pipeline_parallel_size: 2", "pipeline_parallel_size: 3"))
    assert run.end() == "FAILED"
    assert run.facts()["ExitCode"] == f"{USER_ERROR_CODE}:0" and run.codes() == [USER_ERROR_CODE], run.said()
    assert 1 <= run.said().count("megalite: error: ") <= 2, "once per host"

    run = Submitted(slurm, tmp_path, config)
    run.until(lambda: [listens(one.pid) for one in run.ranks().values()] == [True, True])
    slurm.run("scancel", "--signal=USR1", run.number)
    assert run.end() == "FAILED"
    assert run.codes()[-1] == PREEMPTED_CODE and "is NOT put back into the queue" in run.said()

    run = Submitted(slurm, tmp_path, config)
    run.trains(session=1)
    slurm.run("scontrol", "update", f"JobId={run.number}", "Requeue=0")
    slurm.run("scancel", "--signal=USR1", run.number)
    assert run.end() == "FAILED"
    assert run.codes()[-1] == PREEMPTED_CODE and "ends here, saved" in run.said()
    assert max(complete(run.run_dir / "checkpoints")) == run.step()


def test_slurm_is_asked_before_it_is_given_a_job(slurm: SlurmCluster, config: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml", config)
    words = [BIN / "megalite", "slurm", path, "--nodes", "2", "--gpus-per-node", "1", "--submit"]
    assert "Job " in (said := slurm.run(*words, "--dry-run")) and "on nodes node[1-2]" in said
    assert slurm.run("squeue", "--noheader") == "" and not Path(config["run_dir"]).exists()
    for refused in (
        ["--partition", "nowhere"],
        ["--gpus-per-node", "4", "parallel.data_parallel_size=4", "training.global_batch_size=8"],
    ):
        done = slurm.cluster.hosts["head"].run([*words, *refused], env=slurm.environment)
        assert done.returncode == USER_ERROR_CODE and done.stderr.count("\n") <= 2, done
        assert "megalite: error: sbatch does not take the job: Batch job submission failed: " in done.stderr
