"""`megalite import` and `megalite export` as they are typed: options, what they say, exit codes, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from launch.cli.app import app
from launch.cli.convert import parse_size
from launch.errors import INTERRUPTED_CODE, LaunchError
from tests.helpers.hub_models import HUB_MODELS

LLAMA = HUB_MODELS[0]


def megalite(*words: object, code: int = 0) -> str:
    """What the command prints, in this process."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return LLAMA.save(tmp_path / "hf", torch.bfloat16)


def test_both_ways_with_every_option(tmp_path: Path, folder: Path) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    planned = megalite("import", folder, checkpoint, "--dry-run")
    assert f"would import {folder} -> {checkpoint}: llama, 30 tensors, 77,280 parameters, bf16" in planned
    assert "model.safetensors" in planned and "writes 309.1 kB" in planned and not checkpoint.exists()
    said = megalite("import", folder, checkpoint)
    assert "llama, 30 tensors, 77,280 parameters, bf16" in said and "B/s)" in said and "MB of memory" in said
    assert "validated in" in said and "packed documents" in said
    said = megalite("import", folder, checkpoint, "--overwrite", "--no-validate", "--dtype", "fp16")
    assert "NOT VALIDATED" in said and "fp16" in said

    assert "model-00001-of-" in megalite("export", checkpoint, out, "--dry-run", "--max-shard-size", "40KB")
    summary = json.loads(megalite("export", checkpoint, out, "--max-shard-size", "40KB", "--json", "--no-validate"))
    assert summary["dtype"] == "fp16" and summary["logit_difference"] is None and summary["tensors"] == 30
    assert all(path.stat().st_size < 45_000 for path in out.glob("*.safetensors"))
    assert (out / "model.safetensors.index.json").is_file()
    said = megalite("export", checkpoint, out, "--overwrite", "--dtype", "fp32")
    assert "fp32" in said and "logits within" in said and [p.name for p in out.glob("*.safe*")] == ["model.safetensors"]


def test_a_mistake_is_one_sentence_with_exit_code_2(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "megalite"
    words = [str(command), "import", str(tmp_path / "none"), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == f"megalite: error: {tmp_path / 'none'}: there is no such folder"


def test_ctrl_c_is_a_sentence(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.conversion.huggingface.importing.validate_logits", interrupted)
    done = CliRunner().invoke(app, ["import", str(folder), str(tmp_path / "out")])
    assert done.exit_code == INTERRUPTED_CODE and done.stderr == "megalite: warning: interrupted; nothing was written\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = {"500MB": 5e8, "2 GB": 2e9, "1.5gb": 1.5e9, "1GiB": 2**30, "64k": 64e3, "2Gi": 2**31, "1000": 1000}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "-1MB", "0MB", "2 bananas", "1e9", "1,000MB", "2GB,", "1-2GB", "100"):
        with pytest.raises(LaunchError, match="is no size of a file"):
            parse_size(text)
