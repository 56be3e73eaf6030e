"""`checkpoint.interval: auto`: how often to save, so that saves and work lost in failures together cost least.

A short interval pays for saves, a long one for what a failure throws away. The best lies where Young (1974) and Daly
(2006) found it (megalite/planner/reliability_interval.py); it needs what a save costs, which is measured, and the mean
time between failures, which is configured, observed in the run folder, or assumed - and said. All durations are in
seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megalite.monitor.goodput import ENDS
from megalite.planner.reliability_interval import best_interval_s

# Where nothing is known. Llama 3 lost a job of 16,384 GPUs every 3 hours (arXiv:2407.21783, section 3.3.4), one machine
# may run for months. A guess wrong by a factor of 4 makes saves and lost work together cost 25% more.
ASSUMED_HOURS = 24.0
FIRST_SAVE_STEPS = 10  # the first save is early: it is the measurement
NOTICEABLE = 0.2  # of an interval: smaller changes are not told
RECENT_SAVES = 5


@dataclass(frozen=True)
class FailureHistory:
    """What is known of how often this run fails."""

    failures: int = 0  # sessions that ended without saying so, after at least one step
    trained_s: float = 0.0  # by all earlier sessions, without their startup
    configured_s: float | None = None  # checkpoint.mean_hours_between_failures

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]], configured_hours: float | None) -> FailureHistory:
        """From the events of a run folder, the running session's `started` among them.

        A session that was asked to end, also by Ctrl-C, or that a guard stopped, did not fail; one that died before its
        first step lost no work, however often it would have saved.
        """
        failures, trained_s = 0, 0.0
        said_so = True
        for event in events:
            if event.get("event") == "started":
                here_s = float(event.get("previous_s", 0.0)) - float(event.get("startup_s", 0.0))
                trained_s += max(0.0, here_s)
                failures += here_s > 0 and not said_so
                said_so = False
            elif event.get("event") in ENDS:
                said_so = True
        return cls(failures, trained_s, configured_hours * 3600 if configured_hours else None)

    def mean_time_between_failures(self, running_s: float) -> tuple[float, str]:
        """Seconds, and where the number is from; `running_s`: how long this session has trained."""
        if self.configured_s is not None:
            return self.configured_s, "as configured"
        seen_s = self.trained_s + max(0.0, running_s)
        if self.failures:
            return max(seen_s, 1.0) / self.failures, f"observed: {self.failures} in {_words(seen_s)}"
        if seen_s > ASSUMED_HOURS * 3600:
            return seen_s, f"at most: none in {_words(seen_s)}"
        return ASSUMED_HOURS * 3600, f"assumed: none seen in {_words(seen_s)}"


class IntervalPlanner:
    """Says after each step whether a save is due. It goes by clocks, so one rank asks it and tells the others.

    What it counts as training is all time from call to call but that for which saves blocked: evaluations, self-checks
    and whatever else comes between two steps would be done again after a failure as well.
    """

    def __init__(
        self, history: FailureHistory, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`say` takes the sentence with the numbers, whenever they have changed noticeably; `clock` gives seconds."""
        self._history, self._say, self._clock = history, say, clock
        self._asked: float | None = None  # when, the last time
        self._running_s = self._since_save_s = self._told_s = 0.0
        self._steps_since_save, self._steps_until_measured = 0, FIRST_SAVE_STEPS
        self._step_s: deque[float] = deque(maxlen=50)
        self._blocked_s: deque[float] = deque(maxlen=RECENT_SAVES)
        self._duration_s: deque[float] = deque(maxlen=RECENT_SAVES)

    def step(self, step_s: float) -> bool:
        """Whether a save is due now, after a step that took `step_s`, which is asked after every step. A due one counts
        as begun: where it fails, the next is due an interval later."""
        now = self._clock()
        passed_s = step_s if self._asked is None else max(step_s, now - self._asked)
        self._asked = now
        self._step_s.append(passed_s)
        self._running_s += passed_s
        self._since_save_s += passed_s
        self._steps_since_save += 1
        if self._blocked_s:
            # the save is nearer to its time now than after one step more
            is_due = self._since_save_s + step_s / 2 >= self.interval_s()
        else:
            is_due = self._steps_since_save >= self._steps_until_measured
            if is_due:
                self._steps_until_measured *= 2  # until one succeeds
        if is_due:
            self.began()
        return is_due

    def began(self) -> None:
        """A save has begun for another reason, such as the end of the run."""
        self._since_save_s, self._steps_since_save = 0.0, 0

    def saved(self, blocked_s: float, duration_s: float) -> None:
        """Takes what a complete save took: while training stood still, and in all."""
        self._running_s -= blocked_s  # the call of `step` before or after this one counts it in
        self._since_save_s -= blocked_s
        self._blocked_s.append(blocked_s)
        self._duration_s.append(max(blocked_s, duration_s))
        interval_s = self.interval_s()
        if abs(interval_s - self._told_s) > NOTICEABLE * self._told_s:
            self._told_s = interval_s
            self._say(self.sentence())

    def interval_s(self) -> float:
        """Seconds of training between saves; only once a save has been measured."""
        mean_s, _ = self._history.mean_time_between_failures(self._running_s)
        return best_interval_s(median(self._blocked_s), mean_s, max(self._duration_s))

    def sentence(self) -> str:
        """The numbers that make the interval."""
        mean_s, source = self._history.mean_time_between_failures(self._running_s)
        interval_s = self.interval_s()
        steps = max(1, round(interval_s / median(self._step_s))) if any(self._step_s) else 1
        return (
            f"checkpoint.interval auto: a save every {_words(interval_s)} ({steps} step{'s' * (steps > 1)}), because "
            f"one blocks {_words(median(self._blocked_s))} and takes {_words(max(self._duration_s))}, and a failure is "
            f"expected every {_words(mean_s)} ({source})"
        )


def _words(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1000:.2g} ms"
