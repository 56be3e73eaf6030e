"""Weights & Biases; offline needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.config import WandbConfig


class WandbSink:
    """One wandb run. Where `online` cannot reach the server the run goes on offline and says so."""

    def __init__(self, options: WandbConfig, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(init_timeout=20, silent=True)
        arguments: dict[str, Any] = {
            "project": options.project,
            "name": options.name,
            "dir": str(run_dir),
            "config": config,
            "settings": settings,
        }
        try:
            self._run = wandb.init(mode=options.mode, **arguments)
        except wandb.errors.Error as error:
            print(f"wandb is not reachable ({error}): logging offline, upload with `wandb sync`", flush=True)
            self._run = wandb.init(mode="offline", **arguments)

    def log(self, record: dict[str, Any]) -> None:
        numbers = {name: value for name, value in record.items() if not isinstance(value, list) and name != "step"}
        self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        self._run.finish()
