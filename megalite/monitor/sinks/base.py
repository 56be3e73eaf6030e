"""What every sink is."""

from __future__ import annotations

from typing import Any, Protocol


class Sink(Protocol):
    """Takes the record of each step; told when the run ends."""

    def log(self, record: dict[str, Any]) -> None:
        """One step's record, as in metrics.jsonl."""

    def close(self) -> None:
        """The run is over."""
