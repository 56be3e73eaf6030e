"""Observers of a run: they see what happens while it trains and change nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalite.checkpoint.saver import Saved  # pulls in torch, which readers of metrics.jsonl do not need


class Observer:
    """Base class; every method may be left out. Only rank 0 has observers that write anything.

    The run's log calls observers in the order of its list. One that raises is counted and reported, and the run goes
    on; so nothing in an observer may be collective.
    """

    name: str  # under which its failures are reported; by default the class's

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__)

    def on_start(self) -> None:
        """Is called before the first step."""

    def on_step(self, record: dict[str, Any]) -> None:
        """Takes the record of a step, as in metrics.jsonl; may add entries for the observers after it."""

    def on_intervention(self, facts: dict[str, Any], sentence: str) -> None:
        """Takes what a guard did about a step that was not taken, for events.jsonl and for the console."""

    def on_checkpoint(self, saved: Saved) -> None:
        """Takes the result of a save that has ended, complete or failed."""

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        """Is called when training has ended as it should, with one of `goodput.ENDS`.

        `save_blocked_s`: how long training waited for saves that no step's record contains.
        """

    def close(self) -> None:
        """Is called last, also after a crash."""
