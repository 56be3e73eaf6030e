"""Saves that fail, or take long: training goes on, says so each time, and tries again; what was saved before stays.

The disks are real ones, small enough to be full, where the user may mount any; else the test tells that it cannot.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.errors import FAILED_CODE
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.writer import SPARE_BYTES
from megalite.monitor.sinks.jsonl import stream_records
from tests.e2e.conftest import References
from tests.helpers.audit import audit_against, complete, events, hidden, same_checkpoint
from tests.helpers.commands import metrics
from tests.helpers.faults import clock_jumps_back, die_at, failing_writer, full_disk, several, slow_writer, small_files
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

BATCH, STEPS, INTERVAL = 4, 20, 3
SAVES = [3, 6, 9, 12, 15, 18, 20]
CHECKPOINT_BYTES = 600_000  # of the tiny model, rounded up
Disk = Callable[[Path, str], None]


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages that save every third step."""
    tiny["training"]["steps"] = STEPS
    parallel, checkpoint = {"pipeline_parallel_size": 2}, {"interval": INTERVAL, "keep_last": 0}
    return tiny | {"parallel": parallel, "checkpoint": checkpoint, "monitor": {"plot": False, "report": False}}


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Makes a folder a disk of its own, or changes the options of that disk."""
    as_root = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    mounted: list[Path] = []

    def mount(folder: Path, options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        options = f"mode=0755,{options}" if folder not in mounted else f"remount,{options}"
        words = [*as_root, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0 and not mounted:
            pytest.skip(f"needs the right to mount a disk: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        mounted.append(folder)

    yield mount
    for folder in set(mounted):
        subprocess.run([*as_root, "umount", "--lazy", str(folder)], check=True)


def told(said: str, step: int) -> str:
    """What the run has said of a save that failed."""
    (line,) = (line for line in said.splitlines() if f" megalite: warning: step {step} is not saved" in line)
    return line


@pytest.mark.parametrize("rank", [0, 1])
def test_files_may_not_grow(rank: int, config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """The first two saves fail on one rank, with the kernel's own error; the next finds room again."""
    run_dir = Path(config["run_dir"])
    said = train(tmp_path / "session", config, fault=(small_files, (rank, 100_000, 2)))
    assert [event["step"] for event in events(run_dir, "save_failed")] == SAVES[:2]
    assert [event["step"] for event in events(run_dir, "saved")] == SAVES[2:]
    for step in SAVES[:2]:
        line = told(said, step)
        assert f"rank_0000{rank}_000.safetensors: cannot be written: File too large: make it writable" in line, line
        assert ("rank 1: " in line) == (rank == 1), line
    audit_against(references.of(config).run_dir, run_dir, BATCH)
    assert complete(run_dir / "checkpoints") == set(SAVES[2:])


def test_an_error_of_the_writer_is_retried_at_the_next_interval(
    config: dict[str, Any], references: References, tmp_path: Path
) -> None:
    run_dir = Path(config["run_dir"])
    said = train(tmp_path / "session", config, fault=(failing_writer, (1, 2)))
    assert [event["step"] for event in events(run_dir, "save_failed")] == [6]
    assert "Input/output error" in told(said, 6)
    audit_against(references.of(config).run_dir, run_dir, BATCH)
    assert complete(run_dir / "checkpoints") == {*SAVES} - {6}


DISKS = {  # options of a tmpfs that has room for two or three checkpoints
    "no room": f"size={SPARE_BYTES + 3 * CHECKPOINT_BYTES}",
    "no room for a file": "size=1g,nr_inodes=12",
    "no room for the manifest": "size=1g,nr_inodes=13",
    "no room for `latest`": "size=1g,nr_inodes=14",
}
ADVICE = "free some space, or keep fewer checkpoints (checkpoint.keep_last)"


@pytest.mark.parametrize("kind", DISKS)
def test_a_full_disk(kind: str, disk: Disk, config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """Every save fails from the third or fourth on, the last one too; with a larger disk the run goes on from there."""
    root = Path(config["run_dir"]) / "checkpoints"
    disk(root, DISKS[kind])
    why = "are free" if kind == "no room" else "the disk is full"
    good = fails_to_save(config, tmp_path / "session", f"{why}: {ADVICE}")
    assert good in ({3, 6}, {3, 6, 9})
    disk(root, "size=1g,nr_inodes=1000")
    assert f"resumes from step {max(good)} of" in train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, root.parent, BATCH)
    assert complete(root) >= good


def fails_to_save(config: dict[str, Any], folder: Path, why: str) -> set[int]:
    """A session that trains to its end, but whose last saves fail for a reason; the steps that are saved."""
    run_dir = Path(config["run_dir"])
    with session(folder, config) as running:
        assert running.wait() == [FAILED_CODE] * 2, running.output()
        said = running.output(0)
    failed = events(run_dir, "save_failed")
    first = SAVES.index(failed[0]["step"])
    assert [event["step"] for event in failed] == [*SAVES[first:], STEPS], "the last save is tried twice"
    for event in failed:
        then = "it is tried once more" if event["step"] == STEPS else "training goes on"
        assert why in event["reason"], event
        if event is not failed[-1]:  # which ends the run
            assert said.count(f"megalite: warning: step {event['step']} is not saved, {then}: {event['reason']}\n") == 1
    last = said.splitlines()[-1]
    assert last.endswith(
        f" megalite: error: not saved: the state of step {STEPS} could not be saved: {failed[-1]['reason']}"
    )
    assert "Traceback" not in said and len(metrics(run_dir)) == STEPS
    good = complete(run_dir / "checkpoints")
    assert good >= set(SAVES[:first]) and not hidden(run_dir / "checkpoints")
    return good


def test_a_read_only_disk(disk: Disk, config: dict[str, Any], references: References, tmp_path: Path) -> None:
    root = Path(config["run_dir"]) / "checkpoints"
    disk(root, "size=1g")
    with session(tmp_path / "session", config, fault=(die_at, ("committed, not pruned", 0, [0, 1], 2))) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output()
    before = complete(root)
    disk(root, "ro")
    assert fails_to_save(config, tmp_path / "session", "Read-only file system: make it writable") == before
    disk(root, "rw")
    train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, root.parent, BATCH)


def test_a_disk_that_is_full_for_a_while_holds_up_nothing(
    disk: Disk, config: dict[str, Any], references: References, tmp_path: Path
) -> None:
    """The whole run folder is on it, so records of steps and events may be missing: what is there is right."""
    run_dir = Path(config["run_dir"])
    disk(run_dir, f"size={SPARE_BYTES + 30 * CHECKPOINT_BYTES}")
    train(tmp_path / "session", config, fault=(full_disk, (str(run_dir), 5, 13)))
    records, whole = list(stream_records(run_dir / "metrics.jsonl")), metrics(references.of(config).run_dir)
    by_step = {record["step"]: record["loss"] for record in whole}
    assert all(record["loss"] == by_step[record["step"]] for record in records)
    assert {record["step"] for record in records} >= {1, 2, 3, 4, *range(14, STEPS + 1)}
    assert {3, 15, 18, 20} <= complete(run_dir / "checkpoints") <= {3, 12, 15, 18, 20}
    same_checkpoint(run_dir, references.of(config).run_dir, STEPS)


def test_a_slow_writer_has_one_save_on_its_way(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """A save is due after every step and takes much longer: the next one waits, and training says for how long."""
    config["training"]["steps"], config["checkpoint"]["interval"] = 6, 1
    run_dir, slow_s, most = Path(config["run_dir"]), 2.0, 0
    with session(tmp_path / "session", config, fault=(slow_writer, (slow_s,))) as running:
        while any(process.is_alive() for process in running.ranks):
            most = max(most, len(list((run_dir / "checkpoints").glob(".step_*.tmp"))))
            time.sleep(0.01)
        assert running.wait() == [0, 0], running.output()
    assert most == 1
    saved = events(run_dir, "saved")
    assert [event["step"] for event in saved] == [1, 2, 3, 4, 5, 6]
    assert all(event["total_s"] > slow_s > event["blocked_s"] for event in saved), "a save's own share is its copy"
    records, (end,) = metrics(run_dir), events(run_dir, "ended")
    trained_s = sum(record["step_time_s"] for record in records[1:])
    waited_s = sum(record["save_blocked_s"] for record in records) + end["save_blocked_s"]
    assert waited_s > 6 * slow_s - trained_s - 1.0, "one after the other, and what is not training is waiting"
    audit_against(references.of(config).run_dir, run_dir, BATCH)


def test_a_clock_that_jumps_back(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """By a day, in the middle of a session and between two: the newest checkpoint is that of the last step, and no
    share of the time is negative."""
    run_dir = Path(config["run_dir"])
    root, death = run_dir / "checkpoints", (die_at, ("committed, not pruned", 0, [0, 1], 3))
    for step in (5, 1):
        jump = (clock_jumps_back, (step,))
        with session(tmp_path / "session", config, fault=(several, (jump, death))) as running:
            assert running.wait() == [-signal.SIGKILL] * 2, running.output()
    written = [read_manifest(root / f"step_{step:08d}").written for step in sorted(complete(root))]
    assert written[0] > max(written[1:]), "the clock has not jumped"
    newest = max(complete(root))
    assert f"resumes from step {newest} of" in train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, run_dir, BATCH)
