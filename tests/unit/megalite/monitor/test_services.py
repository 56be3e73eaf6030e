"""TensorBoard, trackio and Weights & Biases get the numbers of a record, each under its own name."""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config import Config, ConfigError
from megalite.config.sections import MonitorConfig, PrometheusConfig
from megalite.monitor.flat_records import flat_numbers
from megalite.monitor.requirements import check_monitoring, check_textfile
from megalite.monitor.sinks import tensorboard, trackio

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


def test_nested_numbers_have_flat_names() -> None:
    assert flat_numbers(RECORD) == FLAT


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
        log=lambda numbers, step: calls.append(("log", (numbers, step))), finish=lambda: calls.append(("finish", None))
    )
    fake = ModuleType("trackio")
    fake.__spec__ = ModuleSpec("trackio", None)
    fake.init = lambda **options: calls.append(("init", options)) or run  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "trackio", fake)
    check_monitoring(config.monitor)
    sink = trackio.open_sink(config, 0)
    assert sink is not None
    sink.on_step(RECORD)
    sink.close()
    assert [name for name, _ in calls] == ["init", "log", "finish"]
    assert (calls[0][1]["project"], calls[0][1]["name"]) == ("megalite", "first")
    assert calls[0][1]["config"]["training"]["steps"] == 4 and calls[1][1] == (FLAT, 3)


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
