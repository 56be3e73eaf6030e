"""A host that wakes up after another attempt has taken its run's folder changes nothing there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from launch.runtime.run_lock import LOCK, take_lock
from megalite.checkpoint import writer
from megalite.checkpoint.durable_files import temporary_folder
from megalite.checkpoint.fence import FENCED_CODE, Fence
from megalite.checkpoint.manifest import LATEST, read_manifest
from tests.helpers.damaging import write


def test_a_frozen_attempt_ends_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file server has given its lock to another process; neither blocks nor a checkpoint nor `latest` follow."""

    def end(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(writer, "fence", fence := Fence())
    take_lock(tmp_path).close()
    fence.begin(tmp_path / LOCK, fence.read(tmp_path / LOCK))
    fence.check()
    first, second = write(tmp_path / "step_00000001"), tmp_path / "step_00000002"
    writer.start(second)
    take_lock(tmp_path).close()  # the next attempt
    fence.check(at_most_every_s=100.0)  # a step, which is not looked at so often
    for late in (
        fence.check,
        lambda: writer.write_blocks(temporary_folder(second), "rank_00000", []),
        lambda: writer.commit(second, read_manifest(first)),
    ):
        with pytest.raises(SystemExit) as ended:
            late()
        assert ended.value.code == FENCED_CODE
    assert (tmp_path / LATEST).read_text() == first.name and not second.exists()
    (tmp_path / LOCK).unlink()
    fence.check()  # no attempt says that it has taken the folder
