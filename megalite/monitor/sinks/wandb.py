"""Weights & Biases; offline needs no network."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any, Literal

from megalite.config import Config
from megalite.config.tracking import WandbConfig
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord, flat_numbers
from megalite.monitor.tracking_run import TrackingRun

log = logging.getLogger(__name__)
LONGEST_GROUP = 128  # letters, by wandb's rule


class WandbSink(Observer):
    """Logs to one wandb run, the same in all sessions. If `online` cannot reach the server, the session is logged
    offline and a warning says so.

    wandb refuses numbers of a step that is not later than the last, so ours is an x axis: a step that is done again
    gets a second point.
    """

    def __init__(self, options: WandbConfig, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        _ignore_settings_here(wandb.Settings)
        kept = TrackingRun(run_dir, "wandb")
        arguments: dict[str, Any] = {
            "project": options.project,
            "entity": options.entity,
            "name": options.name,
            "group": options.group or str(run_dir)[-LONGEST_GROUP:],
            "tags": options.tags or None,
            "id": kept.name() or secrets.token_hex(4),
            "resume": "allow",
            "dir": str(run_dir),
            "config": config,
            "allow_val_change": True,  # a session may have another layout
        }

        def start(mode: Literal["online", "offline"]) -> Any:
            return wandb.init(mode=mode, settings=wandb.Settings(init_timeout=20, silent=True), **arguments)

        try:
            try:
                self._run = start(options.mode)
            except wandb.errors.Error as error:
                if "deleted" not in str(error):
                    raise
                log.warning(f"wandb run {arguments['id']} of this folder was deleted: it gets another one")
                arguments["id"] = secrets.token_hex(4)
                self._run = start(options.mode)
        except wandb.errors.Error as error:
            log.warning(f"wandb is not reachable ({error}): logging offline, upload with `wandb sync`")
            wandb.teardown()  # its process still holds the id
            self._run = start("offline")
        kept.keep(arguments["id"])
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, record: StepRecord) -> None:
        # wandb counts from 0 in each offline session, and drops what it has had when they are synced
        number = max(record["step"], self._run.step)
        self._run.log(flat_numbers(record) | {"step": record["step"]}, step=number, commit=True)

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
    """Starts a wandb run, or goes on with that of an earlier session, if `monitor.wandb.enabled`."""
    wandb = config.monitor.wandb
    return WandbSink(wandb, config.run_dir, config.model_dump(mode="json")) if wandb.enabled else None
