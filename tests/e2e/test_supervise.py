"""A supervisor and real processes: what it restarts, when it gives up, what it passes on, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.errors import LaunchError
from launch.supervision.run_progress import RunProgress, run_exit_code
from launch.supervision.supervisor import Policy, config_of, describe, supervise_run
from megalite.config import ConfigError
from megalite.monitor.events import read_events
from megalite.resilience.signals import REPEAT_S
from tests.conftest import write_config
from tests.helpers.attempts import save, write_event
from tests.helpers.commands import ROOT

ATTEMPTS = Path(__file__).parents[1] / "helpers" / "attempts.py"
FROM_SCRATCH = "after step 3; no checkpoint yet; the same command begins again with step 1"
MARK = "MEGALITE_TEST_MARK"


class Supervised:
    """One supervised command in a run folder; knows its processes by a mark in their environment."""

    def __init__(
        self, run_dir: Path, plan: list[dict[str, Any]], *options: str, command: list[str] | None = None
    ) -> None:
        self.run_dir, self.mark = run_dir, uuid.uuid4().hex
        (run_dir / "plan.json").write_text(json.dumps(plan))
        command = command or [sys.executable, str(ATTEMPTS), str(run_dir)]
        options = ("--run-dir", str(run_dir), "--first-wait", "0.05", *options)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch", "supervise", *options, "--", *command],
            env=os.environ | {MARK: self.mark},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, timeout_s: float = 30) -> tuple[int, list[str]]:
        """Exit code and what was said; fails if a process is left."""
        _, said = self.process.communicate(timeout=timeout_s)
        assert self.processes() == []
        return self.process.returncode, [
            line.removeprefix("megalite: ").removeprefix("warning: ") for line in said.splitlines()
        ]

    def starts(self) -> list[tuple[float, int]]:
        """Time and process id of each attempt."""
        path = self.run_dir / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(line.split()[0]), int(line.split()[1])) for line in lines]

    def wait_for_start(self, number: int = 1) -> int:
        """Process id of the attempt once it is there."""
        wait_until(lambda: len(self.starts()) >= number)
        return self.starts()[number - 1][1]

    def processes(self) -> list[psutil.Process]:
        return marked(self.mark)


def marked(mark: str) -> list[psutil.Process]:
    """Processes that live and have the mark in their environment, wherever they hang in the tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(plan: list[dict[str, Any]], *options: str, command: list[str] | None = None) -> Supervised:
        started.append(Supervised(tmp_path, plan, *options, command=command))
        return started[-1]

    yield start
    for one in started:
        for process in one.processes():
            process.kill()


def test_a_run_that_fails_is_restarted_until_it_is_done(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    plan = [
        {"steps": 3, "save": 2, "code": 1},
        {"steps": 5, "save": 4, "signal": "SIGKILL"},
        {"steps": 5, "save": 5, "code": 86},
        {"steps": 9, "code": 0},
    ]
    run = supervise(plan)
    code, said = run.end()
    expected = [
        "restart 1 of 5 in 0.05 s: exit code 1 after step 3; newest checkpoint: step 2",
        "restart 2 of 5 in 0.05 s: exit code 137 (SIGKILL) after step 5; newest checkpoint: step 4",
        "restart 3 of 5 in 0.05 s: exit code 86 (a rank died or hung, and the watchdog ended the run) after step 5; "
        "newest checkpoint: step 5",
    ]
    assert (code, said) == (0, expected)
    assert len(run.starts()) == 4
    log = (tmp_path / "supervisor.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in log] == expected


def test_it_waits_ever_longer_without_a_new_checkpoint(supervise: Callable[..., Supervised]) -> None:
    plan = [{"steps": step, "code": 1} for step in (1, 2, 3, 4)]
    plan += [{"steps": 5, "save": 4, "code": 1}, {"steps": 6, "code": 0}]
    run = supervise(plan, "--first-wait", "0.2", "--longest-wait", "0.7")
    code, said = run.end()
    waits = [line.split(" in ")[1].split(" s:")[0] for line in said]
    assert (code, waits) == (0, ["0.2", "0.4", "0.7", "0.7", "0.2"])
    measured = [later - earlier for (earlier, _), (later, _) in pairwise(run.starts())]
    assert all(float(wait) <= gap for wait, gap in zip(waits, measured, strict=True)), measured


def test_it_gives_up_where_the_same_step_fails_twice(supervise: Callable[..., Supervised]) -> None:
    code, said = supervise([{"steps": 7, "save": 6, "code": 1}, {"steps": 7, "code": 1}]).end()
    assert code == 1 and len(said) == 2
    assert said[1] == (
        "gave up: it failed twice in a row without progress: exit code 1 after step 7; newest checkpoint: step 6; "
        "the same command goes on from step 6"
    )


def test_it_gives_up_where_no_step_is_ever_reached(supervise: Callable[..., Supervised]) -> None:
    code, said = supervise([{"code": 1}] * 4 + [{"signal": "SIGSEGV"}], "--longest-wait", "0").end()
    assert (code, len(said)) == (139, 6) and "a module of yours" in said[0]
    assert said[-1].startswith(f"gave up: 5 attempts in a row failed before they had trained a step: {describe(139)}")


def test_a_start_that_fails_for_a_while_does_not_end_a_run_that_trains(supervise: Callable[..., Supervised]) -> None:
    """Records and checkpoints of the session before are still there, and are not this one's."""
    trained = {"events": ["started"], "steps": 7, "save": 6, "code": 1}
    fails: list[dict[str, Any]] = [{"code": 1}, {"events": ["started"], "resumed": 7, "code": 1}]
    mistakes = [{"code": 2}, {"code": 2}]  # the lock is held by a rank that dies, say, or the storage is not back
    done = {"events": ["started", "ended"], "resumed": 6, "steps": 9, "code": 0}
    code, said = supervise([trained, *fails, *mistakes, done], "--longest-wait", "0").end()
    assert code == 0 and len(said) == 5, said
    assert said[-1].startswith("restart 5 of 5 in 0 s: exit code 2 (a mistake) after step 7; newest checkpoint: step 6")


def test_starts_that_fail_between_do_not_hide_a_step_that_fails_twice(supervise: Callable[..., Supervised]) -> None:
    trained = {"events": ["started"], "steps": 7, "code": 1}
    code, said = supervise([trained, {"code": 1}, trained]).end()
    assert (code, len(said)) == (1, 3) and said[-1].startswith("gave up: it failed twice in a row without progress")


def test_a_folder_that_cannot_be_read_says_nothing(supervise: Callable[..., Supervised]) -> None:
    trained = {"events": ["started"], "steps": 7, "code": 1}
    run = supervise([trained, {"spoil": True, "code": 1}, {"events": ["started", "ended"], "steps": 8, "code": 0}])
    code, said = run.end()
    because = f"{run.run_dir} is unreadable, so the command's exit code alone counts: "
    assert code == 0 and any(because in line for line in said), said
    assert any(line.endswith(f"exit code 1 ({run.run_dir} is unreadable)") for line in said)


@pytest.mark.parametrize(
    ("events", "command_code", "code"),
    [
        (["started", "ended"], 1, 0),
        (["started", "preempted"], 1, 75),
        (["started", "stopped"], 1, 3),
        (["started", "ended", "mirrored"], 0, 0),
    ],
)
def test_what_the_run_says_counts_and_not_its_launcher_s_code(
    supervise: Callable[..., Supervised], events: list[str], command_code: int, code: int
) -> None:
    """torchrun makes 1 of every code."""
    run = supervise([{"events": events, "steps": 3, "code": command_code}])
    assert run.end()[0] == code and len(run.starts()) == 1


def test_a_run_that_hung_is_restarted_and_its_code_is_told(supervise: Callable[..., Supervised]) -> None:
    code, said = supervise([{"events": ["started", "hung"], "steps": 3, "code": 1}], "--restarts", "0").end()
    assert (code, said) == (86, [f"gave up: no restart is allowed: {describe(86)} {FROM_SCRATCH}"])


def test_a_launcher_s_0_is_not_believed_where_the_run_did_not_end(supervise: Callable[..., Supervised]) -> None:
    """`deepspeed` exits with 0 when what it started was killed, also before any rank has said that it starts."""
    plan = [
        {"events": ["started"], "steps": 3, "code": 0},
        {"code": 0},
        {"events": ["started", "ended"], "steps": 5, "code": 0},
    ]
    code, said = supervise(plan).end()
    assert (code, len(said)) == (0, 2) and all(": exit code 1 after step 3" in line for line in said), said


def test_a_finished_run_that_is_started_again_is_done(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    write_event(tmp_path, "started")
    write_event(tmp_path, "ended")
    assert supervise([{"code": 0}]).end() == (0, [])


@pytest.mark.parametrize(("total_steps", "code"), [(6, 0), (7, 1)])
def test_nothing_left_to_train_is_seen_by_the_checkpoint(tmp_path: Path, total_steps: int, code: int) -> None:
    """The session that saved it was killed before it could say that it ended."""
    write_event(tmp_path, "started")
    save(tmp_path, 6)
    folder = RunProgress.read(tmp_path)
    assert folder is not None and run_exit_code(folder, folder, 0, total_steps) == code
    empty = RunProgress()
    assert run_exit_code(empty, empty, 0, total_steps) == 1, "nothing was ever started"
    assert run_exit_code(folder, None, 0, total_steps) == 1, "nobody can say"


def test_of_a_killed_rank_the_signal_is_told_and_not_that_the_others_waited() -> None:
    hung = RunProgress(sessions=1, last_event="hung")
    assert [run_exit_code(RunProgress(), hung, code, None) for code in (0, 1, 86, 137)] == [86, 86, 86, 137]


def test_it_gives_up_when_the_restarts_are_used(supervise: Callable[..., Supervised]) -> None:
    code, said = supervise([{"steps": step, "code": 9} for step in (1, 2, 3)], "--restarts", "2").end()
    end = f"exit code 9 {FROM_SCRATCH}"
    assert (code, said[-1]) == (9, f"gave up: all 2 restarts are used: {end}")


@pytest.mark.parametrize("code", [2, 3, 75, 130])
def test_what_starting_again_does_not_mend_is_not_started_again(
    supervise: Callable[..., Supervised], code: int
) -> None:
    run = supervise([{"steps": 3, "code": code}])
    found, said = run.end()
    assert found == code and len(said) == len(run.starts()) == 1
    assert said[0].startswith(f"not started again: exit code {code} (")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_reaches_the_run_which_saves_and_is_not_restarted(
    supervise: Callable[..., Supervised], tmp_path: Path, name: str
) -> None:
    run = supervise([{"steps": 3, "wait": "signal"}])
    pid = run.wait_for_start()
    run.process.send_signal(getattr(signal, name))
    code, said = run.end()
    assert (code, said) == (75, [f"asked to end by {name}: exit code 75 (asked to end, and saved) {FROM_SCRATCH}"])
    assert (tmp_path / "got").read_text() == f"{pid} {name}\n", "once, and the same one"


def test_ctrl_c_ends_the_run_at_once(supervise: Callable[..., Supervised]) -> None:
    run = supervise([{"wait": "for ever"}])
    run.wait_for_start()
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    code, said = run.end()
    assert (code, said[-1]) == (130, "asked to end by SIGINT: exit code 130 (interrupted)")
    assert "KeyboardInterrupt" in said, "the command had its own time to end"
    assert time.monotonic() - began < 5


def test_what_outlives_the_grace_period_is_killed(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    run = supervise([{"wait": "for ever", "stubborn": True}], "--grace", "0.5")
    run.wait_for_start()
    assert len(run.processes()) == 5, "supervisor, reaper, command, and two that ignore SIGTERM"
    run.process.terminate()
    code, said = run.end()
    assert (code, said) == (137, ["asked to end by SIGTERM: exit code 137 (SIGKILL)"])
    assert "SIGTERM" in (tmp_path / "got").read_text()


def test_a_second_sigterm_ends_all_at_once(supervise: Callable[..., Supervised]) -> None:
    """Slurm signals all processes of a job: what comes within REPEAT_S is still the first."""
    run = supervise([{"wait": "for ever", "stubborn": True}])
    run.wait_for_start()
    began = time.monotonic()
    while run.process.poll() is None:
        assert time.monotonic() - began < 60, "half the grace period"
        run.process.terminate()
        time.sleep(0.2)
    assert time.monotonic() - began > REPEAT_S
    assert run.end()[0] in (143, -signal.SIGTERM), "the last one may have come while it left"


def test_sigusr1_sets_no_limit_and_a_later_sigterm_does(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    run = supervise([{"wait": "for ever"}], "--grace", "0.1")
    run.wait_for_start()
    run.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: (tmp_path / "got").exists())
    time.sleep(1.0)
    assert run.process.poll() is None, "Slurm has a limit of its own: it knows for when it has announced it"
    run.process.terminate()
    assert run.end()[0] == 137


def test_helpers_that_end_do_not_pile_up(supervise: Callable[..., Supervised]) -> None:
    run = supervise([{"daemons": 10, "wait": "signal"}])
    run.wait_for_start()
    (reaper,) = psutil.Process(run.process.pid).children()
    wait_until(lambda: len(reaper.children()) == 1)
    run.process.terminate()
    assert run.end()[0] == 75


BYSTANDER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: as the first process of a container, it adopts all orphans
script = 'sleep 100 & echo $! > "$0/bystander"; until [ -e "$0/starts" ]; do sleep 0.05; done'
subprocess.Popen(["sh", "-c", script, sys.argv[1]], env={"PATH": os.environ["PATH"]}, start_new_session=True)
os.execv(sys.executable, [sys.executable, "-m", "launch", *sys.argv[2:]])
"""


def test_an_adopted_process_that_is_not_the_run_s_lives_on(tmp_path: Path) -> None:
    """A `nohup` in a container whose first process is the supervisor."""
    (tmp_path / "plan.json").write_text(json.dumps([{"wait": "signal", "stubborn": True}]))
    command = ["--", sys.executable, str(ATTEMPTS), str(tmp_path)]
    words = ["supervise", "--run-dir", str(tmp_path), "--grace", "0.5", *command]
    process = subprocess.Popen([sys.executable, "-c", BYSTANDER, str(tmp_path), *words], cwd=ROOT)
    wait_until((tmp_path / "starts").exists)
    bystander = psutil.Process(int((tmp_path / "bystander").read_text()))
    try:
        wait_until(lambda: bystander.ppid() == process.pid)
        wait_until(lambda: len(psutil.Process(process.pid).children()) == 2)  # its shell is collected
        left = [one for one in psutil.Process(process.pid).children(recursive=True) if one.pid != bystander.pid]
        assert len(left) == 4, "reaper, command, and two that the command started"
        process.terminate()
        assert process.wait(timeout=30) == 75
        assert bystander.is_running() and not psutil.wait_procs(left, timeout=5)[1]
    finally:
        bystander.kill()
        process.kill()


def test_what_a_dead_command_leaves_behind_is_ended_before_the_next_start(
    supervise: Callable[..., Supervised], tmp_path: Path
) -> None:
    run = supervise(
        [{"steps": 1, "stubborn": True, "signal": "SIGKILL"}, {"wait": "signal"}], "--grace", "0.3", "--first-wait", "0"
    )
    pid = run.wait_for_start(2)
    others = {process.pid for process in run.processes()}
    assert len(others) == 3 and {pid, run.process.pid} < others, "only supervisor, reaper and the new command"
    assert (tmp_path / "stubborn").read_text().split() == ["SIGTERM"] * 2, "they could have ended by themselves"
    run.process.terminate()
    assert run.end()[0] == 75


@pytest.mark.parametrize("victim", ["supervisor", "reaper"])
def test_nothing_outlives_a_supervisor_or_reaper_that_is_killed(
    supervise: Callable[..., Supervised], tmp_path: Path, victim: str
) -> None:
    run = supervise([{"steps": 2, "wait": "for ever", "stubborn": True}, {"code": 0}], "--grace", "0.5")
    run.wait_for_start()
    (reaper,) = psutil.Process(run.process.pid).children()
    (run.process if victim == "supervisor" else reaper).kill()
    if victim == "supervisor":
        run.process.wait()
        wait_until(lambda: not run.processes(), timeout_s=10)
        assert len(run.starts()) == 1
    else:
        code, said = run.end()
        assert code == 0 and said[0] == "ended 3 processes that the run had left behind"
        assert (tmp_path / "stubborn").read_text().split() == ["SIGTERM"] * 2
        assert said[1] == "restart 1 of 5 in 0.05 s: exit code 137 (SIGKILL) after step 2; no checkpoint yet"
    assert "SIGTERM" in (tmp_path / "got").read_text(), "it could have saved"


def test_a_signal_while_it_waits_ends_it(supervise: Callable[..., Supervised]) -> None:
    run = supervise([{"code": 1}], "--first-wait", "100")
    wait_until(lambda: (run.run_dir / "supervisor.log").exists())
    run.process.terminate()
    code, said = run.end(timeout_s=5)
    assert (code, said[-1]) == (143, "asked to end before restart 1")


LAUNCHER = """
import os, subprocess, sys, time
command = [sys.executable, sys.argv[1], sys.argv[2]]
ranks = [subprocess.Popen(command, env=os.environ | {"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": "2"}) for r in "01"]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.parametrize(("name", "arrives"), [("SIGUSR1", "SIGUSR1"), ("SIGHUP", "SIGTERM")])
def test_signals_are_for_ranks_and_not_for_their_launcher(
    supervise: Callable[..., Supervised], tmp_path: Path, name: str, arrives: str
) -> None:
    """A launcher, like this one, dies of SIGTERM, or ends its ranks before they have saved."""
    command = [sys.executable, "-c", LAUNCHER, str(ATTEMPTS), str(tmp_path)]
    run = supervise([{"wait": "signal"}] * 2, command=command)
    run.wait_for_start(2)
    run.process.send_signal(getattr(signal, name))
    assert run.end()[0] == 75
    assert sorted((tmp_path / "got").read_text().splitlines()) == sorted(f"{pid} {arrives}" for _, pid in run.starts())


def test_nohup_is_respected(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = supervise([{"wait": "signal"}])
    finally:
        signal.signal(signal.SIGHUP, previous)
    run.wait_for_start()
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert run.process.poll() is None and not (tmp_path / "got").exists()
    run.process.terminate()
    assert run.end()[0] == 75


def test_a_log_that_cannot_be_written_is_no_reason_to_stop(
    supervise: Callable[..., Supervised], tmp_path: Path
) -> None:
    (tmp_path / "supervisor.log").mkdir()
    code, said = supervise([{"code": 1}, {"code": 0}]).end()
    assert code == 0 and "supervisor.log failed once" in said[2]


def test_what_cannot_be_supervised_is_one_sentence(tiny: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="names no config"):
        supervise_run([sys.executable, "x.py"], Policy())
    with pytest.raises(LaunchError, match="'no-such-program' is not there"):
        supervise_run(["no-such-program", "c.yaml"], Policy())
    with pytest.raises(ConfigError, match=r"c\.yaml does not exist"):
        supervise_run([sys.executable, "c.yaml"], Policy())
    words = ["train", "--restart", "2", str(write_config(tmp_path / "c.yaml", tiny)), "checkpoint.resume=false"]
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("megalite: error: checkpoint.resume is false, so ")


def test_the_run_folder_is_that_of_the_config_in_the_command(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tiny)
    words = ["deepspeed", "--hostfile=hosts", "launch/train.py", str(config), f"run_dir={tmp_path / 'other'}", "--x=3"]
    assert config_of(words).run_dir == tmp_path / "other"


@pytest.mark.slow
def test_a_training_run_survives_a_killed_rank_and_ends_saved_when_it_is_asked_to(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """The whole way: megalite train --restart, the launcher of this machine's ranks, two real ranks."""
    tiny["training"]["steps"] = 100_000
    tiny |= {
        "parallel": {"pipeline_parallel_size": 2},
        "checkpoint": {"interval": 5},
        "monitor": {"plot": False, "report": False},
    }
    config, run_dir, mark = write_config(tmp_path / "c.yaml", tiny), Path(tiny["run_dir"]), uuid.uuid4().hex
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch", "train", "--restart", "3", str(config)],
            env=os.environ | {MARK: mark, "DS_ACCELERATOR": "cpu"},
            cwd=ROOT,
            stdout=said,
            stderr=said,
        )
    try:
        wait_until(lambda: (run_dir / "checkpoints" / "step_00000005" / "manifest.json").exists(), timeout_s=150)
        ranks = [one for one in marked(mark) if one.environ().get("RANK") == "1" and "launch.train" in one.cmdline()]
        ranks[0].kill()
        log = run_dir / "supervisor.log"
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), timeout_s=150)  # made, then written
        assert "restart 1 of 3 in 1 s: exit code 137 (SIGKILL) after step " in log.read_text()
        assert "newest checkpoint: step " in log.read_text()
        events = run_dir / "events.jsonl"
        wait_until(lambda: sum(event["event"] == "started" for event in read_events(events)) == 2, timeout_s=150)
        resumed = read_events(events)[-1]
        wait_until(lambda: len(read_events(events)) > read_events(events).index(resumed) + 1, timeout_s=150)
        process.terminate()
        assert process.wait(timeout=150) == 75
        assert marked(mark) == []
    finally:
        for one in marked(mark):
            one.kill()
    assert resumed["step"] >= 5 and resumed["down_s"] > 0.5
    assert read_events(events)[-1]["event"] == "preempted"
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert (run_dir / "checkpoints" / "latest").read_text() == f"step_{last:08d}"
    assert "asked to end by SIGTERM: exit code 75 (asked to end, and saved)" in (tmp_path / "said").read_text()
