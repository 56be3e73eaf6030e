"""Signs of life: they go on whatever the rank is at, harm nothing, and their end is noticed; nothing else is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.resilience import heartbeat
from megalite.resilience.heartbeat import Beat, Heartbeat, StaleHeartbeats, read_beats
from tests.e2e.test_supervise import wait_until
from tests.helpers.commands import ROOT
from tests.helpers.rank_pool import run_fresh_ranks

ATTEMPT = "a1b2"
LIMIT_S = 1.0
LOOK_S = LIMIT_S / 20
LIVES = """
import sys, time
from pathlib import Path
from megalite.resilience import heartbeat
heartbeat.BEAT_S = 0.1
heart = heartbeat.Heartbeat(Path(sys.argv[1]), int(sys.argv[2]), 4, sys.argv[3])
heart.step = lambda: 7
heart.start()
sys.stdin.read()
heart.stop()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Ranks as processes of their own; each leaves as it should when its stdin is closed."""
    started: list[subprocess.Popen[bytes]] = []

    def one(rank: int, attempt: str = ATTEMPT) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", LIVES, str(tmp_path), str(rank), attempt]
        started.append(subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE))
        wait_until(lambda: rank in read_beats(tmp_path, attempt))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def listen(silence: StaleHeartbeats, seconds: float) -> list[int]:
    """The ranks that are silent at some moment while somebody listens for so long."""
    deadline, found = time.monotonic() + seconds, set()
    while time.monotonic() < deadline:
        found |= {beat.rank for beat in silence.silent()}
        time.sleep(LOOK_S)
    return sorted(found)


def _waits_in_a_collective(rank: int, run_dir: Path) -> tuple[int, list[int]]:
    heartbeat.BEAT_S = 0.1
    dist.barrier()
    seen: list[int] = []
    if rank == 0:
        heart = Heartbeat(run_dir, rank, 2, ATTEMPT)
        heart.start()
        began = time.monotonic()
        dist.all_reduce(torch.ones(1))  # rank 1 is not there yet
        assert time.monotonic() - began > 1
        heart.stop()
    else:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            seen += [beat.count for beat in read_beats(run_dir, ATTEMPT).values()]
            time.sleep(0.05)
        dist.all_reduce(torch.ones(1))
    return os.getpid(), sorted(set(seen))


@pytest.mark.slow
def test_it_beats_while_the_rank_waits_for_another(tmp_path: Path) -> None:
    _, (_, seen) = run_fresh_ranks(_waits_in_a_collective, 2, tmp_path)
    assert len(seen) > 10 and seen == list(range(seen[0], seen[-1] + 1)), seen


def test_what_a_rank_says(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = start(3)
    (beat,) = read_beats(tmp_path, ATTEMPT).values()
    assert (beat.attempt, beat.rank, beat.host, beat.process, beat.step) == (ATTEMPT, 3, os.uname()[1], process.pid, 7)
    assert str(beat) == f"rank 3 on {beat.host} (process {process.pid}, in step 7)"
    assert str(Beat(ATTEMPT, 3, "node1", 4, 1, 0)) == "rank 3 on node1 (process 4, starting)"
    assert read_beats(tmp_path, "another attempt") == {}


def test_a_rank_that_leaves_takes_its_file_along_and_one_that_dies_does_not(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    leaves, dies = start(0), start(1)
    dies.kill()
    leaves.communicate(timeout=20)
    assert leaves.returncode == 0 and list(read_beats(tmp_path, ATTEMPT)) == [1]
    last = start(1)
    last.communicate(timeout=20)
    assert not (tmp_path / heartbeat.FOLDER).exists(), "nothing of it is left behind"


def test_a_smaller_layout_removes_what_the_larger_one_left(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / heartbeat.FOLDER
    folder.mkdir()
    (folder / "beat_0004.json").write_text("of rank 4 of an earlier attempt")
    (folder / "beat_0003.json").write_text("of rank 3, who may be starting")
    start(0)
    assert sorted(path.name for path in folder.iterdir()) == ["beat_0000.json", "beat_0003.json"]


def test_a_line_never_holds_the_end_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "line"
    heartbeat.write_line(path, json.dumps({"step": 1000, "host": "a-long-name"}))
    heartbeat.write_line(path, json.dumps({"step": 7}))
    assert json.loads(path.read_text()) == {"step": 7}
    with pytest.raises(FileNotFoundError):
        heartbeat.write_line(tmp_path / "no such run" / heartbeat.FOLDER / "line", "")


def test_storage_that_fails_is_told_at_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank whose heartbeats are not written is killed before it could tell when it leaves."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    obstacle = tmp_path / heartbeat.FOLDER
    obstacle.write_text("where the folder would be")
    heart = Heartbeat(tmp_path, 0, 1, ATTEMPT)
    heart.start()
    wait_until(lambda: "the heartbeat of rank 0, without which its supervisor ends it, failed 10 times" in caplog.text)
    first = caplog.messages[0]
    assert " failed once, training goes on: UnsafeFile: " in first and str(obstacle) in first, "and the reason"
    obstacle.unlink()
    wait_until(lambda: 0 in read_beats(tmp_path, ATTEMPT))
    heart.stop()
    assert len(caplog.messages) == 3 and "failed while training went on: the heartbeat of rank 0" in caplog.messages[2]
    assert read_beats(tmp_path, ATTEMPT) == {}


def test_a_step_that_cannot_be_told_stops_no_heartbeat(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0, 1, ATTEMPT)
    heart.step = lambda: {}["step"]
    heart.start()
    wait_until(lambda: 0 in read_beats(tmp_path, ATTEMPT))
    assert read_beats(tmp_path, ATTEMPT)[0].step == 0
    heart.stop()


def test_a_run_folder_that_is_not_there_yet_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    heart = Heartbeat(tmp_path / "run", 1, 2, ATTEMPT)
    heart.start()
    time.sleep(0.3)
    assert not (tmp_path / "run").exists(), "it may be a mistake of the user's"
    (tmp_path / "run").mkdir()
    wait_until(lambda: 1 in read_beats(tmp_path / "run", ATTEMPT))
    heart.stop()
    assert not caplog.messages


def test_storage_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a file takes for ever, as on a network file system whose server is gone."""
    is_back = threading.Event()

    def hang(*_: object, **__: object) -> int:
        is_back.wait(60)
        raise OSError

    monkeypatch.setattr(heartbeat, "LEAVE_S", 0.2)
    monkeypatch.setattr(heartbeat, "open_to_write", hang)
    heart = Heartbeat(tmp_path, 0, 1, ATTEMPT)
    began = time.monotonic()
    heart.start()
    time.sleep(0.1)
    heart.stop()
    assert time.monotonic() - began < 2
    is_back.set()  # it may end now


@pytest.mark.slow
def test_only_a_rank_that_was_heard_and_is_not_any_more_is_silent(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Dead and stopped ones are; those that left, that never came, or that are of another attempt are not."""
    leaves, dies, stops, lives, other = start(0), start(1), start(2), start(3), start(9, "another attempt")
    silence = StaleHeartbeats(tmp_path, ATTEMPT, LIMIT_S)
    assert listen(silence, 2 * LIMIT_S) == []
    leaves.communicate(timeout=20)
    dies.kill()
    stops.send_signal(signal.SIGSTOP)
    other.kill()
    began = time.monotonic()
    while not (found := silence.silent()):
        time.sleep(LOOK_S)
    assert time.monotonic() - began > LIMIT_S / 2, "its last sign may be a moment old"
    assert {beat.rank for beat in found} <= {1, 2}
    assert listen(silence, LIMIT_S) == [1, 2]
    stops.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert listen(silence, LIMIT_S) == [1]
    assert lives.poll() is None
    silence.close()
    assert not (tmp_path / heartbeat.FOLDER / heartbeat.READER).exists()


@pytest.mark.slow
def test_who_does_not_listen_has_heard_nothing(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """The machine slept, or the whole job was stopped, more than once."""
    process, silence = start(0), StaleHeartbeats(tmp_path, ATTEMPT, LIMIT_S)
    assert listen(silence, 0.5) == []
    for _ in range(3):
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LIMIT_S)
        assert silence.silent() == [], "the first question after a pause"
        process.send_signal(signal.SIGCONT)
        assert listen(silence, 0.5) == []


def test_nobody_is_silent_where_the_listener_cannot_write_either(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """A storage that takes nothing from anybody is no reason to end ranks, which train on."""
    process, silence = start(0), StaleHeartbeats(tmp_path, ATTEMPT, LIMIT_S)
    (tmp_path / heartbeat.FOLDER / heartbeat.READER).mkdir()
    process.send_signal(signal.SIGSTOP)
    assert listen(silence, 2 * LIMIT_S) == []
    (tmp_path / heartbeat.FOLDER / heartbeat.READER).rmdir()
    assert listen(silence, 2 * LIMIT_S) == [0]


def test_half_a_file_and_no_folder_say_nothing(tmp_path: Path) -> None:
    silence = StaleHeartbeats(tmp_path / "run", ATTEMPT, LIMIT_S)
    assert silence.silent() == [] and read_beats(tmp_path / "run", ATTEMPT) == {}
    assert not (tmp_path / "run").exists()
    folder = tmp_path / heartbeat.FOLDER
    folder.mkdir()
    for number, text in enumerate(("", '{"attempt": "a1', "[]", '{"attempt": "a1b2"}', "null")):
        (folder / f"beat_{number:04d}.json").write_text(text)
    assert read_beats(tmp_path, ATTEMPT) == {}


@pytest.mark.parametrize(("world_size", "seconds"), [(1, 2.0), (256, 2.0), (1024, 5.12), (100_000, 10.0)])
def test_many_ranks_write_seldomer(tmp_path: Path, world_size: int, seconds: float) -> None:
    assert Heartbeat(tmp_path, 0, world_size, ATTEMPT).every_s == seconds
