"""Hugging Face folders made beside a run: real processes, real kills; what fails is said and ends nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from launch.conversion.huggingface.serial_model import global_shapes
from launch.trainer import checkpoint_hooks
from launch.trainer.checkpoint_hooks import Exporter
from launch.trainer.start.resume import clear_exports, exports_of
from megalite.checkpoint.manifest import step_folder
from megalite.config import Config
from tests.helpers.process_table import command_line
from tests.helpers.single_rank import write_single
from tests.helpers.sizes import ODD_SIZES

MODEL = ODD_SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 2}
STEPS = 9


@dataclass
class Ears:
    """Keeps what a run would say."""

    said: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def log_notice(self, sentence: str) -> None:
        self.said.append(sentence)

    log_warning = log_notice

    def event(self, name: str, **facts: Any) -> None:
        self.events.append({"event": name, **facts})


def config_of(folder: Path, **checkpoint: Any) -> Config:
    return Config.model_validate(
        {
            "run_dir": folder / "run",
            "model": MODEL,
            "data": {"path": "unused"},
            "training": {"global_batch_size": 1, "micro_batch_size": 1, "sequence_length": 8, "steps": STEPS},
            "checkpoint": {"export_hf": "every"} | checkpoint,
        }
    )


def save(config: Config, step: int) -> Path:
    """A checkpoint of the run, random weights."""
    shapes = global_shapes(config.model)
    folder = config.run_dir / "checkpoints" / step_folder(step)
    tensors = ((name, 0.2 * torch.randn(shape)) for name, shape in shapes.items())
    made = {"model": config.model.model_dump(mode="json"), "precision": {"dtype": "fp32"}}
    write_single(folder, tensors, step=step, config=made, tokenizer=None, state={})
    return folder


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def exports_by(parent: int) -> list[psutil.Process]:
    """The processes that export for a rank."""
    children = psutil.Process(parent).children()
    return [child for child in children if "launch.trainer.export_process" in command_line(child.pid)]


@pytest.mark.slow
def test_all_that_is_offered_becomes_a_folder_and_the_last_is_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_hooks, "PROGRESS_EVERY_S", 0.05)
    config, ears = config_of(tmp_path, export_hf_dtype="bf16"), Ears()
    exporter = Exporter(config, ears)
    checkpoints = [save(config, step) for step in (3, STEPS)]
    for checkpoint in checkpoints:
        exporter.on_commit(checkpoint)
    wait_until(exporter.pinned)
    assert exporter.pinned() <= set(checkpoints), "what is being read must not be deleted"
    exporter.close(is_done=True)
    assert [event["event"] for event in ears.events] == ["exported"] * 2
    assert ears.events[0]["logit_difference"] is None and ears.events[1]["logit_difference"] <= 1e-5
    first, last = (sentence for sentence in ears.said if sentence.startswith("exported"))
    assert "step_00000003" in first and "not validated" in first
    assert "step_00000009" in last and "logits compared with transformers'" in last
    waiting = [sentence for sentence in ears.said if sentence.startswith(f"waiting for {exports_of(config)}")]
    assert "starting a process" in waiting[0]
    percents = [int(line[:-1].split()[-1]) for line in waiting if "comparing logits with transformers" in line]
    assert percents and percents == sorted(percents), waiting
    assert not exporter.pinned()
    weights = load_file(exports_of(config) / step_folder(STEPS) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    exporter.delete(checkpoints[:1])
    assert [path.name for path in exports_of(config).iterdir()] == [step_folder(STEPS)]


def test_last_means_the_runs_last_step(tmp_path: Path) -> None:
    exporter = Exporter(config_of(tmp_path, export_hf="last"), Ears())
    exporter.on_commit(tmp_path / "run" / "checkpoints" / step_folder(STEPS - 1))
    exporter.close(is_done=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_fails_is_said_and_the_next_one_is_made(tmp_path: Path) -> None:
    """One checkpoint is damaged, one has been deleted before its turn: each gets a line and an event."""
    config, ears = config_of(tmp_path), Ears()
    damaged, gone, good = (save(config, step) for step in (1, 2, 3))
    (damaged / "manifest.json").unlink()
    for path in gone.iterdir():
        path.unlink()
    gone.rmdir()
    exporter = Exporter(config, ears)
    for checkpoint in (damaged, gone, good):
        exporter.on_commit(checkpoint)
    exporter.close(is_done=True)
    assert [event["event"] for event in ears.events] == ["export_failed", "export_failed", "exported"]
    assert "has no manifest.json" in ears.events[0]["reason"] and "was deleted before" in ears.events[1]["reason"]
    assert f"by hand: megalite export {damaged}" in "".join(ears.said) and "Traceback" not in "".join(ears.said)
    assert [path.name for path in exports_of(config).iterdir()] == [good.name]


def test_a_folder_that_is_made_is_not_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has ended well, and a library's line of JSON came after the summary."""
    config, ears = config_of(tmp_path), Ears()

    def run_process(exporter: Exporter, checkpoint: Path, folder: Path, *_: object) -> tuple[int, dict[str, Any]]:
        folder.mkdir(parents=True)
        return 0, {"level": "info"}

    monkeypatch.setattr(Exporter, "_run_process", run_process)
    exporter = Exporter(config, ears)
    exporter.on_commit(config.run_dir / "checkpoints" / step_folder(STEPS))
    exporter.close(is_done=True)
    folder = exports_of(config) / step_folder(STEPS)
    assert ears.said == [f"{folder} is made, but its size and type cannot be told: KeyError: 'dtype'"]
    assert not ears.events, "it has not failed"


@pytest.mark.slow
def test_a_run_that_ends_early_cancels_at_once(tmp_path: Path) -> None:
    config, ears = config_of(tmp_path), Ears()
    exporter = Exporter(config, ears)
    exporter.on_commit(save(config, 3))
    exporter.on_commit(save(config, 6))
    wait_until(lambda: exports_by(os.getpid()))
    started = time.monotonic()
    exporter.close(is_done=False)
    assert time.monotonic() - started < 5
    assert not ears.events and "the run ends before: the next one makes it" in ears.said[0]
    assert not exports_of(config).exists() or not list(exports_of(config).iterdir())


OFFERING = """
import sys, time
from pathlib import Path
from launch.trainer.checkpoint_hooks import Exporter
from tests.e2e.test_export_hf import Ears, config_of
exporter = Exporter(config_of(Path(sys.argv[1])), Ears())
exporter.on_commit(Path(sys.argv[2]))
time.sleep(60)
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_takes_its_export_along(tmp_path: Path) -> None:
    """SIGKILL of the rank: nothing is left running, no folder is half there, and the next run starts clean."""
    config = config_of(tmp_path)
    checkpoint = save(config, 3)
    rank = subprocess.Popen([sys.executable, "-c", OFFERING, str(tmp_path), str(checkpoint)])
    wait_until(lambda: exports_by(rank.pid))
    (child,) = exports_by(rank.pid)
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, seconds=20)
    clear_exports(config)
    folder = exports_of(config)
    assert not folder.exists() or {path.name for path in folder.iterdir()} <= {checkpoint.name}
