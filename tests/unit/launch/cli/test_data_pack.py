"""`megalite data pack` as it is typed: a plan for each split, once; a run without one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.storage.indexed import IndexedWriter
from tests.conftest import VOCAB_SIZE, write_config
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
