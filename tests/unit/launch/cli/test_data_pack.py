"""`megalite data pack` as it is typed: a plan for each split, once; a run without one is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.storage.indexed_writer import IndexedWriter
from data_pipeline.storage.meta import read_meta
from tests.conftest import VOCAB_SIZE, write_config
from tests.helpers.commands import command_line
from tests.unit.data_pipeline.test_loss_mask import write_masked
from tests.unit.launch.cli.test_mistakes import command


def test_plans_are_written_once_and_a_run_wants_them(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    draw = np.random.default_rng(3)
    prefixes = [tmp_path / "first", tmp_path / "second"]
    for prefix in prefixes:
        with IndexedWriter(prefix, np.uint16) as writer:
            for length in draw.integers(1, 40, 200).tolist():
                writer.append(draw.integers(0, VOCAB_SIZE, length).astype(np.uint16), np.array([length]))
    tiny["data"] |= {"path": list(map(str, prefixes)), "document_mask": True, "packing": "best_fit"}
    config = str(write_config(tmp_path / "c.yaml", tiny))
    code, _, err = command(["train", config, "--dry-run"], monkeypatch, capfd)
    assert code == 2 and err.count("\n") == 1, err
    assert f"{prefixes[0]} has no plan of best-fit packing for the train split" in err and "megalite data pack" in err
    code, out, err = command(["data", "pack", config], monkeypatch, capfd)
    assert code in (None, 0) and not err, err
    plans = sorted(path.name for path in tmp_path.glob("*.npy"))
    assert plans == [
        f"{name}.pack-32-{split}-0.3.npy" for name in ("first", "second") for split in ("held_out", "train")
    ]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")}
    code, out, _ = command(["data", "pack", config, "--json"], monkeypatch, capfd)
    packed = json.loads(out)
    assert [(each["split"], each["is_reused"]) for each in packed] == [("train", True), ("held_out", True)] * 2
    assert all(each["filled"] > 0.9 and each["samples"] <= each["pieces"] for each in packed)
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")}
    code, out, err = command(["train", config, "--dry-run"], monkeypatch, capfd)
    assert code in (None, 0), err
    code, _, err = command(["data", "pack", config, "data.packing=concat"], monkeypatch, capfd)
    assert code == 2 and "data.packing is concat, which needs no plan" in err


def test_the_plan_of_a_folder_that_may_not_be_written_lies_in_the_cache(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared data that only its owner may write could not be packed. Plans that others can write are not read."""
    (tmp_path / "shared").mkdir()
    with IndexedWriter(tmp_path / "shared" / "web", np.uint16) as writer:
        for _ in range(40):
            writer.append(np.ones(30, dtype=np.uint16), np.array([30]))
    tiny["data"] = {
        "path": str(tmp_path / "shared" / "web"), "packing": "best_fit", "document_mask": True, "held_out_fraction": 0
    }  # fmt: skip
    tiny["training"]["evaluation"] = {"interval": 0}
    config, env = str(write_config(tmp_path / "c.yaml", tiny)), {"DS_ACCELERATOR": "cpu"}
    monkeypatch.setattr("launch.trainer.data.packing.may_be_written", lambda folder: False)
    assert "set data.cache to a folder of yours" in command_line("data", "pack", config, env=env).stderr
    cached = f"data.cache={tmp_path / 'cache'}"
    for is_reused in (False, True):
        done = command_line("data", "pack", config, cached, "--json", env=env)
        assert [one["is_reused"] for one in json.loads(done.stdout)] == [is_reused], done
    (plan,) = (tmp_path / "cache").glob("*/*.npy")
    assert not list((tmp_path / "shared").glob("*.npy"))
    assert command_line("train", config, cached, "--dry-run", env=env).returncode == 0
    plan.chmod(0o666)
    assert "has no plan of best-fit packing" in command_line("train", config, cached, "--dry-run", env=env).stderr


def test_the_epochs_of_a_run_without_a_length_are_said_in_steps(tiny: dict[str, Any], tmp_path: Path) -> None:
    """`data plan` was to say how many steps epochs come to, and asked for the number; so did packing, without need."""
    for name, count in (("web", 7), ("code", 4)):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for _ in range(count):
                writer.append(np.ones(30, dtype=np.uint16), np.array([30]))
    sources = {
        "web": {"path": str(tmp_path / "web"), "epochs": 3},
        "code": {"path": str(tmp_path / "code"), "epochs": 2},
    }
    tiny["data"] = {"sources": sources, "packing": "best_fit", "document_mask": True, "held_out_fraction": 0}
    tiny["training"] |= {"steps": None, "evaluation": {"interval": 0}}
    config, env = str(write_config(tmp_path / "c.yaml", tiny)), {"DS_ACCELERATOR": "cpu"}
    assert "is not known yet" in command_line("data", "plan", config, env=env).stderr
    assert command_line("data", "pack", config, env=env).returncode == 0
    for words in (["data", "plan"], ["train", "--dry-run"]):
        done = command_line(*words, config, env=env)
        known = "2 epochs of code, 3 epochs of web are 29 samples, which are 8 steps of 4: set training.steps to 8"
        assert done.returncode == 2 and f"a run needs a length: {known}" in done.stderr, done
    assert command_line("data", "plan", config, "training.steps=8", env=env).returncode == 0


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_samples_without_a_target_are_counted_before_a_run_and_alone_are_refused(
    tiny: dict[str, Any], tmp_path: Path, packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A run whose answers had all been cut off trained to its end with a loss of 0.0000, and said nothing."""
    prefix = tmp_path / "chats"
    tiny["data"] = {
        "path": str(prefix), "packing": packing, "document_mask": True, "too_long": "cut", "held_out_fraction": 0
    }  # fmt: skip
    tiny["training"]["evaluation"] = {"interval": 0}
    config, env = str(write_config(tmp_path / "c.yaml", tiny)), {"DS_ACCELERATOR": "cpu"}
    commands = [["train", config, "--dry-run"]]
    commands[:0] = [["data", "pack", config]] if packing == "best_fit" else []
    for marked, code, words in (
        ([], 2, "error: 10 of the 10 samples"),
        ([100], 2, "error: 10 of the 10 samples"),  # the first token of a document is no target
        ([99, 299], 0, "of the 10 samples of the train split hold no token that carries loss"),
    ):
        write_masked(prefix, [[1] * 100] * 3, np.isin(np.arange(300), marked))
        meta = read_meta(prefix)
        assert meta is not None
        replace(meta, vocab_size=VOCAB_SIZE).write(prefix)
        for words_of_command in commands:
            done = command_line(*words_of_command, env=env)
            said = done.stderr + caplog.text
            caplog.clear()
            assert done.returncode == code and words in said, done
            assert "raise training.sequence_length, or set data.too_long skip" in said, done
    write_masked(prefix, [[1] * 100] * 3, np.ones(300))
    meta = read_meta(prefix)
    assert meta is not None
    replace(meta, vocab_size=VOCAB_SIZE).write(prefix)
    evaluated = ["training.evaluation={interval: 1, samples: 30}", f"data.validation={{x: {{path: '{prefix}'}}}}"]
    done = command_line("train", config, "--dry-run", *evaluated, env=env)
    assert done.returncode == 0 and "dry run on cpu" in done.stdout and "carries loss" not in caplog.text
    # a loss over the same ten samples three times looked like one over thirty
    assert "x: an evaluation reads 30 samples, but the train split has 10, so each is read 3 times" in caplog.text
