"""Section `watchdog`: when a run that makes no progress is ended."""

from __future__ import annotations

from megalite.config.base import PositiveFloat, Section


class WatchdogConfig(Section):
    """A run that hangs says who waits for whom, and ends, so that it can be started again."""

    enabled: bool = True
    """End a run that makes no progress."""

    factor: PositiveFloat = 10.0
    """A step may take this many times the longest of the last 20; evaluations and saves likewise, by their own."""

    minimum_seconds: PositiveFloat = 300.0
    """But never less than this."""

    startup_minutes: PositiveFloat = 30.0
    """Until the first step (evaluation, save) has ended, while nothing is known about its length."""

    timeout_minutes: PositiveFloat = 30.0
    """A rank that waits so long for others in one collective, of any process group, fails; the watchdog comes first."""
