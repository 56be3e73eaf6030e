"""Sections of the services that keep the numbers of runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megalite.config.base import Section

Tag = Annotated[str, Field(min_length=1, max_length=64)]


class TrackingConfig(Section):
    """Options of every such service."""

    enabled: bool = False
    """Report to it. All sessions of a run folder are one run there, under the name that the folder keeps."""

    project: str = "megalite"
    """Project the run appears in."""

    name: str | None = Field(default=None, examples=["first_try"])
    """Name of the run in the project. Left out: the service chooses one."""

    group: str | None = Field(default=None, min_length=1, max_length=128, examples=["ablations"])
    """Group of runs that it belongs to. Left out: `run_dir`."""


class WandbConfig(TrackingConfig):
    """Reporting to Weights & Biases."""

    mode: Literal["online", "offline"] = "offline"
    """`offline` writes to the run folder, needs no network, and can be uploaded later."""

    entity: str | None = Field(default=None, min_length=1, max_length=128, examples=["our_team"])
    """User or team that the project belongs to. Left out: that of the account."""

    tags: tuple[Tag, ...] = Field(default=(), examples=[("baseline",)])
    """Tags of the run."""


class TrackioConfig(TrackingConfig):
    """Reporting to trackio, on this machine. Needs `pip install trackio`."""
