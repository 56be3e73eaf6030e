"""What must be true of a run folder after any fault: nothing lost, nothing seen twice, the same curve."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from megalite.checkpoint.durable_files import verify_digest
from megalite.checkpoint.manifest import LATEST, STEP
from megalite.checkpoint.reader import CheckpointReader
from megalite.monitor.events import EVENTS, read_events
from tests.helpers.commands import metrics

Record = dict[str, Any]
EXACT = ("step", "samples", "tokens_seen", "learning_rate", "loss", "grad_norm", "evaluation_loss", "skipped")


def audit(run_dir: Path, steps: int, batch: int) -> list[Record]:
    """Every step once and every sample once, in their order; the records."""
    records = metrics(run_dir)  # every line of it is whole
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    ranges = [record["samples"] for record in records]
    assert ranges[0][0] == 0 and ranges[-1][1] == steps * batch, ranges
    assert all(first[1] == second[0] for first, second in pairwise(ranges)), ranges
    assert all(last - first == batch for first, last in ranges), ranges
    assert not any(record["skipped"] for record in records)
    goodput = [record["goodput"] for record in records]
    assert all(0 <= share <= 1 for share in goodput), goodput
    return records


def audit_against(reference: Path, run_dir: Path, batch: int) -> None:
    """The same, and each number equal to the last bit to that of a run that nothing happened to."""
    wanted = metrics(reference)
    records = audit(run_dir, len(wanted), batch)
    for record, other in zip(records, wanted, strict=True):
        assert _exact(record) == _exact(other)
    root = run_dir / "checkpoints"
    assert (root / LATEST).read_text() == f"step_{len(wanted):08d}"
    assert not hidden(root), "what an interrupted save left must go with the next run"
    same_checkpoint(run_dir, reference, len(wanted))


def same_checkpoint(run_dir: Path, other: Path, step: int) -> None:
    """Weights and moments of a step, and the run's state with them, are equal to the last bit."""
    first, second = (CheckpointReader(folder / "checkpoints" / f"step_{step:08d}") for folder in (run_dir, other))
    verify_digests(first.folder)
    assert first.manifest.files == second.manifest.files
    assert first.manifest.state == second.manifest.state


def verify_digests(folder: Path) -> None:
    """Compares the SHA-256 of every file of a checkpoint. Raises CheckpointError naming the first that differs."""
    for name, recorded in CheckpointReader(folder).manifest.files.items():
        verify_digest(folder / name, recorded)


def _exact(record: Record) -> str:
    return json.dumps({name: record.get(name) for name in EXACT})


def complete(root: Path) -> set[int]:
    """Steps of the checkpoints in `root`, all of which must be complete to the last bit."""
    if not root.is_dir():
        return set()
    visible = {path.name for path in root.iterdir() if not path.name.startswith(".")} - {LATEST}
    assert all(map(STEP.fullmatch, visible)), visible
    for name in visible:
        verify_digests(root / name)
    return {int(name.removeprefix("step_")) for name in visible}


def hidden(root: Path) -> list[str]:
    """Names of what interrupted saves left."""
    return sorted(path.name for path in root.glob(".*"))


def lost(before: set[int], after: set[int], keep_last: int) -> set[int]:
    """Checkpoints that are not there any more, though none of the policy's reasons took them."""
    stays = sorted(before | after)[-keep_last:] if keep_last else before | after
    return (before - after) & set(stays)


def steps_done(run_dir: Path) -> int:
    """The last step on record, while a run is going on."""
    log = run_dir / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def events(run_dir: Path, name: str) -> list[Record]:
    """The events of a name so far."""
    return [event for event in read_events(run_dir / EVENTS) if event["event"] == name]
