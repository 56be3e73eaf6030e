"""What a run leaves in its folder beside metrics and checkpoints: config.yaml, deepspeed.json, receipt.json."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launch.errors import LaunchError
from megalite.config import Config, ResolvedLayout

PACKAGES = ("megalite", "torch", "deepspeed", "transformers", "tokenizers", "numpy")


def make_run_folder(config: Config) -> None:
    """Creates `run_dir`. Raises LaunchError where that cannot be."""
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        probe = config.run_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LaunchError(f"run_dir {config.run_dir} cannot be written: {error.strerror}") from None


def write_settings(config: Config, deepspeed: dict[str, Any]) -> None:
    """config.yaml, resolved, and deepspeed.json, exactly as handed to DeepSpeed."""
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    (config.run_dir / "deepspeed.json").write_text(json.dumps(deepspeed, indent=2) + "\n")


def write_receipt(config: Config, layout: ResolvedLayout, facts: dict[str, Any]) -> None:
    """receipt.json: what ran, on what, from what; written at the start and again, with its outcome, at the end."""
    receipt = {
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": {"platform": platform.platform(), "host": platform.node()},
        "command": sys.argv,
        "git": _git_state(),
        "layout": {
            "tensor_parallel_size": layout.tensor_parallel_size,
            "pipeline_parallel_size": layout.pipeline_parallel_size,
            "data_parallel_size": layout.data_parallel_size,
            "zero_stage": layout.zero_stage,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        },
        "seed": config.training.seed,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **facts,
    }
    (config.run_dir / "receipt.json").write_text(json.dumps(receipt, indent=2) + "\n")


def _git_state() -> dict[str, Any] | None:
    """Commit of this checkout and whether it has changes; None where it is none."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
