"""Weights & Biases; offline needs no network."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from megalite.config import Config
from megalite.config.sections import WandbConfig
from megalite.monitor.flat_records import flat_numbers
from megalite.monitor.observer import Observer

log = logging.getLogger(__name__)


class WandbSink(Observer):
    """Logs to one wandb run. If `online` cannot reach the server, the run is logged offline and a warning says so."""

    def __init__(self, options: WandbConfig, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        _ignore_settings_here(wandb.Settings)
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
            log.warning(f"wandb is not reachable ({error}): logging offline, upload with `wandb sync`")
            self._run = wandb.init(mode="offline", **arguments)

    def on_step(self, record: dict[str, Any]) -> None:
        self._run.log(flat_numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _ignore_settings_here(settings: Any) -> None:
    """Lets wandb's class of settings read no file of the current folder, with one warning if there is one.

    That folder may be somebody else's, and `base_url` in its file names the server that is sent WANDB_API_KEY. No
    option leaves the file out: wandb reads it before any option.
    """
    ignored = Path(settings().settings_workspace)
    if ignored.is_file():
        log.warning(
            f"{ignored} is not read, it may be somebody else's: put what you need of it (base_url, entity) into "
            "~/.config/wandb/settings, or into WANDB_BASE_URL and WANDB_ENTITY"
        )
    settings.settings_workspace = property(lambda self: os.devnull)


def open_sink(config: Config, first_step: int) -> WandbSink | None:
    """Starts a wandb run if `monitor.wandb.enabled`."""
    wandb = config.monitor.wandb
    return WandbSink(wandb, config.run_dir, config.model_dump(mode="json")) if wandb.enabled else None
