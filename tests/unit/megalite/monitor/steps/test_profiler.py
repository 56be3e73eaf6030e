"""Requests for a profile, what becomes of one that cannot be written, and what an accelerator did at the same time."""

from __future__ import annotations

import copy
import gzip
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler_util

from megalite.config import Config, ConfigError, resolve_layout
from megalite.monitor.steps import profiler as profiler_module
from megalite.monitor.steps.profiler import REQUEST, DeviceTime, StepProfiler
from tests.helpers.engine_cases import Case
from tests.helpers.recorded_run import config_of


def _profiler(run_dir: Path, rank: int = 0, steps: tuple[int, ...] = ()) -> StepProfiler:
    config = config_of(Case(), run_dir, {"profile": {"steps": steps}})
    return StepProfiler(config, rank, "cpu", cleans=rank == 0)


def _profile(profiler: StepProfiler, step: int) -> None:
    profiler.begin(step)
    torch.ones(3) + 1
    profiler.end()


def test_a_request_is_taken_once_and_by_rank_0(tmp_path: Path) -> None:
    first, second = _profiler(tmp_path), _profiler(tmp_path, rank=1)
    assert not first.takes_request()
    (tmp_path / REQUEST).touch()
    assert not second.takes_request()
    assert first.takes_request() and not first.takes_request() and not (tmp_path / REQUEST).exists()


def test_what_is_no_request_is_left_alone_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path, elsewhere = tmp_path / REQUEST, tmp_path / "elsewhere"
    elsewhere.touch()
    for make, what in (
        (path.mkdir, "a folder"),
        (lambda: path.symlink_to(elsewhere), "a symbolic link"),
        (lambda: os.mkfifo(path), "a named pipe"),
    ):
        make()
        profiler = _profiler(tmp_path)
        caplog.clear()
        assert not profiler.takes_request() and not profiler.takes_request()
        assert [what in record.message for record in caplog.records] == [True], what
        path.rmdir() if what == "a folder" else path.unlink()
    assert elsewhere.exists()


def test_a_request_that_cannot_be_removed_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every step of the run would be profiled."""
    (tmp_path / REQUEST).touch()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not _profiler(tmp_path).takes_request()


def test_only_the_named_steps_have_a_profile_and_an_earlier_one_of_the_step_is_replaced(tmp_path: Path) -> None:
    """A resumed run may have fewer ranks, and its profile would be read with those of ranks that are no more."""
    profiler, old = _profiler(tmp_path, steps=(2,)), tmp_path / "profile/step_2/rank_7.json.gz"
    old.parent.mkdir(parents=True)
    old.touch()
    for step in (1, 2, 3):
        _profile(profiler, step)
    profiler.is_asked = True
    _profile(profiler, 5)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["step_2", "step_5"]
    assert not old.exists() and (old.parent / "rank_0.txt").read_text()
    assert gzip.decompress((old.parent / "rank_0.json.gz").read_bytes()).rstrip().endswith(b"}")


def test_a_disk_that_is_full_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiler_module.shutil, "copyfileobj", full)
    profiler = _profiler(tmp_path, steps=(1, 2))
    _profile(profiler, 1)
    assert "No space left" in caplog.text
    assert not list((tmp_path / "profile/step_1").iterdir())
    monkeypatch.undo()
    _profile(profiler, 2)
    assert (tmp_path / "profile/step_2/rank_0.json.gz").exists(), "the next one is another matter"


def test_a_trace_that_torch_could_only_write_in_part_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tells nobody that the disk is full."""
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(path).write_text('{"traceEvents": [')
    )
    _profile(_profiler(tmp_path, steps=(1,)), 1)
    assert "is cut: is there room?" in caplog.text and not list((tmp_path / "profile/step_1").iterdir())


def test_a_step_that_fails_leaves_no_profile_open(tmp_path: Path) -> None:
    """A process has one profiler: the next one could not begin."""
    profiler = _profiler(tmp_path, steps=(1, 2))
    profiler.begin(1)
    profiler.close()
    _profile(profiler, 2)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_2"]


def test_snapshots_of_memory_are_refused_on_a_cpu() -> None:
    values = Case().config().model_dump(mode="json", exclude_unset=True)
    config = Config.model_validate(values | {"monitor": {"profile": {"memory": True}}})
    with pytest.raises(ConfigError, match=r"monitor\.profile\.memory needs a GPU, but this run is on a CPU"):
        resolve_layout(config, 1, "cpu")
    resolve_layout(config, 1, "cuda")


def test_time_of_a_device_counts_each_moment_once() -> None:
    """Two streams compute from 0 to 40 us and from 30 to 60, NCCL runs from 20 to 35 and from 50 to 90."""
    kernels = [
        ("ampere_sgemm", 0.0, 40.0),
        ("vectorized_elementwise", 10.0, 20.0),
        ("flash_fwd", 30.0, 60.0),
        ("ncclDevKernel_AllReduce", 20.0, 35.0),
        ("ncclDevKernel_SendRecv", 50.0, 90.0),
        ("Memcpy DtoH", 0.0, 500.0),
    ]
    found = DeviceTime.of(kernels)
    assert found == pytest.approx((60e-6, 55e-6, 25e-6))
    assert found.sentence() == "computation 0.1 ms, communication 0.1 ms, 0.0 ms of it beside computation"
    assert DeviceTime.of([]) == (0, 0, 0)


def test_a_summary_tells_of_the_device_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU here, its kernels are made from an operation's event of the CPU, whose names torch may change."""
    config = config_of(Case(), tmp_path, {"profile": {"steps": [1]}})
    profiler, events = StepProfiler(config, 0, "cuda", cleans=False), torch.profiler.profile.events

    def with_kernels(self: torch.profiler.profile) -> list[Any]:
        (found,) = [event for event in events(self) or () if event.name == "aten::add"]
        annotation = copy.copy(found)
        found.device_type = annotation.device_type = torch._C._autograd.DeviceType.CUDA
        found.time_range, annotation.time_range = (
            profiler_util.Interval(0.0, 2000.0),
            profiler_util.Interval(0.0, 9000.0),
        )
        annotation.is_user_annotation = True
        return [*(events(self) or ()), annotation]

    monkeypatch.setattr(torch.profiler.profile, "events", with_kernels)
    _profile(profiler, 1)
    text = (tmp_path / "profile/step_1/rank_0.txt").read_text()
    assert text.startswith("computation 2.0 ms, communication 0.0 ms, 0.0 ms of it beside computation\n\n")
    assert "aten::add" in text
