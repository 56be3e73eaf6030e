"""Section `monitor`: where a run reports. `metrics.jsonl` in the run folder is always written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megalite.config.base import PositiveInt, Section


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = False
    """Report to Weights & Biases."""

    project: str = "megalite"
    """Project the run appears in."""

    name: str | None = None
    """Name of the run there. Left out: Weights & Biases invents one."""

    mode: Literal["online", "offline"] = "offline"
    """`offline` writes to the run folder, needs no network, and can be uploaded later."""


class MonitorConfig(Section):
    """Console, pictures and services."""

    log_interval: PositiveInt = 1
    """Steps between lines on the console."""

    plot: bool = True
    """Write `loss.png` to the run folder at the end."""

    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""
