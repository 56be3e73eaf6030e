"""A supervisor ends what gives no sign of life, and starts it again; it takes nothing else for silence."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.supervision.liveness import HeartbeatMonitor
from megalite.monitor.events import read_events
from megalite.resilience import heartbeat
from megalite.resilience.heartbeat import Beat, read_beats
from tests.conftest import write_config
from tests.e2e.test_supervise import Supervised, wait_until
from tests.helpers.commands import ROOT

LIMIT_S = 3.0
RANKS = """
# Two ranks, each of which beats and notes that it is there. They end once `done` is there; from the second attempt on
# it is. What "dies" is in the first one alone. Those that are "unmarked" are no ranks by their environment.
import json, os, subprocess, sys, time
from pathlib import Path
from megalite.resilience import heartbeat

heartbeat.BEAT_S = 0.1
run_dir, options = Path(sys.argv[1]), json.loads((Path(sys.argv[1]) / "plan.json").read_text())
if len(sys.argv) == 2:
    environments = [os.environ | {"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": "2"} for r in "01"]
    if options.get("unmarked"):
        environments = [os.environ, os.environ]
    command = [sys.executable, "-c", sys.orig_argv[2], *sys.argv[1:]]
    ranks = [subprocess.Popen([*command, str(r)], env=environment) for r, environment in enumerate(environments)]
    sys.exit(max(rank.wait() for rank in ranks))
rank = sys.argv[2]
heart = heartbeat.Heartbeat(run_dir, int(rank), 2, os.environ["MEGALITE_ATTEMPT"])
heart.step = lambda: 7
if not options.get("mute"):
    heart.start()
with (run_dir / f"pids_{rank}").open("a") as file:
    file.write(f"{os.getpid()} {os.environ['MEGALITE_ATTEMPT']}\\n")
while len((run_dir / f"pids_{rank}").read_text().splitlines()) == 1 and not (run_dir / "done").exists():
    time.sleep(0.02)
if not options.get("mute"):
    heart.stop()
"""


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(*options: str, **plan: bool) -> Supervised:
        words = [sys.executable, "-c", RANKS, str(tmp_path)]
        started.append(Supervised(tmp_path, [], *options, command=words))
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        return started[-1]

    yield start
    for one in started:
        for process in one.processes():
            process.kill()


def attempts_of(run_dir: Path, rank: int) -> list[tuple[int, str]]:
    """Process id and attempt of each start of a rank."""
    path = run_dir / f"pids_{rank}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def wait_for_ranks(run_dir: Path) -> tuple[list[int], str]:
    """Their process ids and the name of the attempt, once both are heard."""
    wait_until(lambda: all(attempts_of(run_dir, rank) for rank in (0, 1)))
    pids, names = zip(*(attempts_of(run_dir, rank)[0] for rank in (0, 1)), strict=True)
    assert len(set(names)) == 1
    return list(pids), names[0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_falls_silent_ends_the_attempt(
    supervise: Callable[..., Supervised], tmp_path: Path, fault: str
) -> None:
    """Nobody but the rank itself knows that it is one, and its launcher waits for it or for the others for ever."""
    run = supervise("--silence", str(LIMIT_S), unmarked=True)
    pids, name = wait_for_ranks(tmp_path)
    wait_until(lambda: len(read_beats(tmp_path, name)) == 2)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(pids[1], getattr(signal, fault))
    code, said = run.end()
    who = f"rank 1 on {os.uname()[1]} (process {pids[1]}, in step 7)"
    assert said[0] == f"{who} has given no sign of life for {LIMIT_S:g} s"
    assert code == 0 and said[1].startswith("restart 1 of 5 in 0.05 s: exit code 137 (SIGKILL)"), said
    assert LIMIT_S < time.monotonic() - began < 20
    assert len(attempts_of(tmp_path, 0)) == 2 and attempts_of(tmp_path, 0)[1][1] != name, "its own name"
    assert not (tmp_path / heartbeat.FOLDER).exists()
    records = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert records[0]["reason"] == said[0]


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_attempt_though_it_was_never_heard(
    supervise: Callable[..., Supervised], tmp_path: Path
) -> None:
    run = supervise("--silence", str(LIMIT_S), mute=True)
    pids, _ = wait_for_ranks(tmp_path)
    os.kill(pids[1], signal.SIGSTOP)
    code, said = run.end()
    assert (
        code == 0 and said[0] == f"rank 1 on {os.uname()[1]} (process {pids[1]}) has been stopped for {LIMIT_S:g} s"
    ), said


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_goes_on(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    """A lid that is closed, or `scontrol suspend`."""
    run = supervise("--silence", str(LIMIT_S))
    _, name = wait_for_ranks(tmp_path)
    wait_until(lambda: len(read_beats(tmp_path, name)) == 2)
    for _ in range(2):
        time.sleep(0.5)
        everybody = run.processes()
        for process in everybody:
            process.suspend()
        time.sleep(1.5 * LIMIT_S)
        for process in everybody:
            process.resume()
    time.sleep(1.25 * LIMIT_S)
    (tmp_path / "done").touch()
    assert run.end() == (0, [])
    assert len(attempts_of(tmp_path, 0)) == 1


@pytest.mark.slow
def test_silence_0_means_that_nobody_listens(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    run = supervise("--silence", "0")
    pids, name = wait_for_ranks(tmp_path)
    wait_until(lambda: len(read_beats(tmp_path, name)) == 2)
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(1.5 * LIMIT_S)
    os.kill(pids[1], signal.SIGCONT)
    (tmp_path / "done").touch()
    assert run.end() == (0, [])


def test_a_debugger_may_hold_a_rank(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "100"])
    libc, attach, detach = ctypes.CDLL(None), 16, 17  # sys/ptrace.h
    try:
        with HeartbeatMonitor(tmp_path, "a", 0.5, lambda: [psutil.Process(process.pid)]) as watcher:
            assert libc.ptrace(attach, process.pid, 0, 0) == 0
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_TRACING_STOP)
            time.sleep(1.5)
            assert watcher.reason() is None
            assert libc.ptrace(detach, process.pid, 0, signal.SIGSTOP) == 0
            wait_until(lambda: watcher.reason() is not None, timeout_s=20)
        reason = f"rank ? on {os.uname()[1]} (process {process.pid}) has been stopped for 0.5 s"
        assert watcher.reason() == reason
    finally:
        process.kill()
        process.wait()


def test_several_that_are_silent_are_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / heartbeat.FOLDER
    folder.mkdir()
    for rank in range(3):
        facts: dict[str, Any] = {"attempt": "a", "rank": rank, "host": "node1", "process": 40 + rank}
        (folder / f"beat_{rank:04d}.json").write_text(json.dumps(facts | {"count": 1, "step": 0}))
    with HeartbeatMonitor(tmp_path, "a", 0.5) as watcher:
        assert watcher.reason() is None
        wait_until(lambda: watcher.reason() is not None, timeout_s=20)
    assert re.fullmatch(
        r"rank \d on node1 \(process 4\d, starting\) has given no sign of life for 0.5 s, nor have 2 others",
        watcher.reason() or "",
    )


def test_storage_that_hangs_keeps_nobody_from_his_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, answers = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        answers.wait()

    monkeypatch.setattr(heartbeat, "write_line", hang)
    began = time.monotonic()
    with HeartbeatMonitor(tmp_path, "a", 0.5, lambda: [psutil.Process()]) as watcher:
        assert hangs.wait(5)
        assert watcher.reason() is None
    assert time.monotonic() - began < 5
    answers.set()


def beats_of(run_dir: Path) -> list[Beat]:
    """In rank order, whatever the attempt; without a rank that is writing its first one."""
    texts = [path.read_text() for path in sorted((run_dir / heartbeat.FOLDER).glob("beat_*.json"))]
    return [Beat(**json.loads(text)) for text in texts if text]


@pytest.mark.slow
def test_a_training_run_goes_on_when_a_rank_was_stopped(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The whole way: real ranks leave signs of life from their start to their end, and the run is finished."""
    tiny["training"]["steps"] = 1000  # of some 10 ms, and a sign of life comes every 2 s
    tiny |= {
        "parallel": {"pipeline_parallel_size": 2},
        "checkpoint": {"interval": 50},
        "monitor": {"plot": False, "report": False},
    }
    config, run_dir = write_config(tmp_path / "c.yaml", tiny), Path(tiny["run_dir"])
    train = (sys.executable, "-m", "launch", "train", str(config))
    words = ["supervise", "--silence", "8", "--first-wait", "0", "--", *train]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch", *words],
            env=os.environ | {"DS_ACCELERATOR": "cpu"},
            cwd=ROOT,
            stdout=said,
            stderr=said,
        )
    try:
        wait_until(
            lambda: len(trains := beats_of(run_dir)) == 2 and all(beat.step > 20 for beat in trains), timeout_s=150
        )
        beats = beats_of(run_dir)
        assert [beat.rank for beat in beats] == [0, 1] and beats[0].attempt == beats[1].attempt
        os.kill(beats[1].process, signal.SIGSTOP)
        stopped = time.monotonic()
        wait_until(lambda: (run_dir / "supervisor.log").exists(), timeout_s=60)
        assert 8 - heartbeat.BEAT_S - 1 < time.monotonic() - stopped < 40, "by its last sign of life"
        assert process.wait(timeout=150) == 0
    finally:
        process.kill()
    who = rf"rank 1 on {os.uname()[1]} \(process {beats[1].process}, in step \d+\) "
    log = (run_dir / "supervisor.log").read_text()
    assert re.search(who + "(has been stopped|has given no sign of life) for 8 s", log), log
    assert [event["event"] for event in read_events(run_dir / "events.jsonl")].count("started") == 2
    assert read_events(run_dir / "events.jsonl")[-1]["event"] == "ended"
    assert not (run_dir / heartbeat.FOLDER).exists(), "all ranks left as they should"
