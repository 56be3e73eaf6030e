"""TensorBoard, trackio and Weights & Biases get the numbers of a record, each under its own name."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from megalite.config import Config, ConfigError
from megalite.config.sections import MonitorConfig, PrometheusConfig
from megalite.config.tracking import WandbConfig
from megalite.monitor.requirements import check_monitoring, check_textfile
from megalite.monitor.sinks import tensorboard, trackio
from megalite.monitor.sinks.wandb import WandbSink
from megalite.monitor.tracking_run import TrackingRun

BLOCK = 1 << 15  # of wandb's file

RECORD = {
    "step": 3,
    "time": 1000.0,
    "loss": 2.5,
    "skipped": False,
    "samples": [0, 4],
    "grad_norm": None,
    "parts_s": {"forward": 0.25, "backward": 0.5},
}
FLAT = {"time": 1000.0, "loss": 2.5, "skipped": False, "parts/forward": 0.25, "parts/backward": 0.5}


@pytest.fixture
def config(tiny: dict[str, Any]) -> Config:
    options = {"tensorboard": True, "trackio": {"enabled": True, "name": "first"}}
    return Config.model_validate(tiny | {"monitor": options})


def test_tensorboard_has_one_curve_for_each_number(config: Config) -> None:
    """Steps that are done again, after a restart or a rollback, replace the earlier ones."""
    sink = tensorboard.open_sink(config, 0)
    assert sink is not None
    for step in (1, 2, 3, 2):
        sink.on_step(RECORD | {"step": step, "loss": math.nan if step == 1 else float(step)})
    sink.close()
    again = tensorboard.open_sink(config, 1)
    assert again is not None
    again.on_step(RECORD | {"step": 2, "loss": 7.0})
    again.close()
    found = EventAccumulator(str(config.run_dir / "tensorboard"), purge_orphaned_data=True).Reload()
    assert set(found.Tags()["scalars"]) == FLAT.keys()
    (first, second) = found.Scalars("loss")
    assert (first.step, second.step, second.value) == (1, 2, 7.0) and math.isnan(first.value)
    assert second.wall_time == 1000.0 and [one.value for one in found.Scalars("parts/backward")] == [0.5, 0.5]


def test_trackio_gets_what_wandb_gets(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """trackio itself would bring another pillow than the tested one, so its three calls are held here."""
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        name="first-2",
        log=lambda numbers, step: calls.append(("log", (numbers, step))),
        finish=lambda: calls.append(("finish", None)),
    )
    fake = ModuleType("trackio")
    fake.__spec__ = ModuleSpec("trackio", None)
    fake.init = lambda **options: calls.append(("init", options)) or run  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "trackio", fake)
    check_monitoring(config.monitor)
    config.run_dir.mkdir()
    sink = trackio.open_sink(config, 0)
    assert sink is not None
    sink.on_step(RECORD)
    sink.close()
    assert [name for name, _ in calls] == ["init", "log", "finish"]
    assert (calls[0][1]["project"], calls[0][1]["name"], calls[0][1]["resume"]) == ("megalite", "first", "never")
    assert calls[0][1]["config"]["training"]["steps"] == 4 and calls[1][1] == (FLAT, 3)
    assert calls[0][1]["group"] == str(config.run_dir)
    trackio.open_sink(config, 3)  # the name was taken: trackio had chosen another, which is gone on with
    assert (calls[3][1]["name"], calls[3][1]["resume"]) == ("first-2", "allow")


SESSIONS = """
import shutil, sys, time
from pathlib import Path
from megalite.config.tracking import WandbConfig
from megalite.monitor.sinks.wandb import WandbSink
options = WandbConfig(enabled=True, entity="us", tags=("a", "b"))
run_dir = Path(sys.argv[1]) / "run"
run_dir.mkdir()
def session(run_dir, ranks, steps, options=options):
    sink = WandbSink(options, run_dir, {"ranks": ranks})
    for step in steps:
        sink.on_step({"step": step, "time": 0.0, "loss": 1.0 + step, "parts_s": {"forward": 0.5}})
    sink.close()
session(run_dir, 1, [1, 2, 3, 4, 2, 3])
shutil.copytree(run_dir, run_dir.with_name("copy"))
run_dir = run_dir.rename(run_dir.with_name("moved"))
time.sleep(1)  # wandb names its folders by the second
session(run_dir, 2, [3, 4])
session(run_dir.with_name("copy"), 1, [5], WandbConfig(enabled=True, group="ours"))
"""


def _records_of(file: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Reads what wandb writes offline: a log in LevelDB's format behind a header of 7 bytes."""
    data, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_all_sessions_of_a_run_folder_are_one_run_of_wandb(tmp_path: Path) -> None:
    """With the real one, offline. Each session was a run of its own, and steps done again were dropped."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SESSIONS, tmp_path], capture_output=True, text=True, check=True, timeout=100
    )
    assert "ignored" not in done.stdout + done.stderr
    runs, steps, axes, numbers = [], [], [], []
    for file in [
        file for name in ("moved", "copy") for file in sorted((tmp_path / name).glob("wandb/offline-run-*/*.wandb"))
    ]:
        if file.is_relative_to(tmp_path / "copy") and file.name == runs[0]:
            continue  # what was copied
        runs.append(file.name)
        for record in _records_of(file):
            if record.HasField("history"):
                found = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                steps.append((int(found["step"]), float(found["loss"])))
                numbers.append(record.history.step.num)
            elif record.HasField("metric"):
                axes.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
            elif record.HasField("run") and record.run.run_group == "ours":
                assert record.run.run_id != runs[0][4:-6], "both would write into one run"
            elif record.HasField("run"):
                assert (record.run.entity, list(record.run.tags)) == ("us", ["a", "b"])
                assert record.run.run_group == str(tmp_path / ("moved" if len(runs) > 1 else "run"))
    assert len(runs) == 3 and len({*runs}) == 2
    assert steps == [(step, 1.0 + step) for step in (1, 2, 3, 4, 2, 3, 3, 4, 5)]
    assert numbers == [1, 2, 3, 4, 5, 6, 3, 4, 5], "of wandb's own, which begin where the session does"
    assert {("step", ""), ("*", "step")} <= {*axes}


def test_a_run_that_was_deleted_in_wandb_gets_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is never given twice: the session, and all after it, would be logged offline."""
    import wandb

    begun: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        begun.append(options)
        if options["id"] == "gone1234":
            raise wandb.errors.CommError("run us/p/gone1234 was previously created and deleted; try a new run name")
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    TrackingRun(tmp_path, "wandb").keep("gone1234")
    monkeypatch.setattr(wandb, "init", init)
    WandbSink(WandbConfig(enabled=True, mode="online"), tmp_path, {})
    assert [one["mode"] for one in begun] == ["online", "online"]
    assert TrackingRun(tmp_path, "wandb").name() == begun[1]["id"] != "gone1234"


@pytest.mark.parametrize(
    ("options", "package", "remedy"),
    [
        ({"prometheus": {"enabled": True}}, "prometheus_client", "pip install 'megalite[prometheus]'"),
        ({"prometheus": {"textfile": "/"}}, "prometheus_client", "pip install 'megalite[prometheus]'"),
        ({"prometheus": {"enabled": True, "gpus": True}}, "pynvml", "pip install 'megalite[prometheus]'"),
        ({"tensorboard": True}, "tensorboard", "pip install 'megalite[tensorboard]'"),
        ({"trackio": {"enabled": True}}, "trackio", "pip install 'trackio'"),
        ({"wandb": {"enabled": True}}, "wandb", "pip install 'wandb'"),
    ],
)
def test_what_is_not_installed_is_one_sentence(
    options: dict[str, Any], package: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a rank starts; else a run would train for hours without what it was to show."""
    from megalite.monitor import requirements

    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(ConfigError, match=rf"^monitor\.\w+ needs {package}, which this Python lacks: .*") as told:
        check_monitoring(MonitorConfig.model_validate(options))
    assert remedy in str(told.value)


def test_a_folder_for_textfiles_must_be_there(tmp_path: Path) -> None:
    options = PrometheusConfig(textfile=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"textfile .*nowhere is no folder that can be written: make it"):
        check_textfile(options)
