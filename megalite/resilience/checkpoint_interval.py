"""Plans `checkpoint.interval: auto`, so that saves and the work lost in failures together cost least.

A short interval costs time for saves, a long one costs work when a failure occurs. The optimum is that of Young (1974)
and Daly (2006), with a bound: `planned_interval_s` of megalite.planner.reliability, which `megalite plan` asks too. It
depends on the cost of a save, which is measured, and on the mean time between failures, which is configured, observed
in the run folder, or assumed from the number of nodes; the notice says which.

Without any information, the first save comes after a minute of training: it is the measurement. So a shorter run saves
only at its end, and a longer one that is killed loses at most that minute, or later an interval, which is an hour at
most unless a save blocks for more than 36 s, and the save on its way. All durations are in seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megalite.monitor.goodput import ENDS
from megalite.planner.cost.checkpoints import LONGEST_INTERVAL_S, Save, is_for_storage, planned_interval_s
from megalite.planner.failure_rates import DEFAULT_RATE, mtbf_hours
from megalite.units import plural, short

FIRST_SAVE_S = 60.0  # of training
FIRST_SAVE_SHARE = 0.1  # of the mean time between failures, where that is less
NOTICEABLE = 0.2  # relative change of the interval from which it is reported
RECENT_SAVES = 5


@dataclass(frozen=True)
class FailureHistory:
    """Failures of this run so far."""

    failures: int = 0  # sessions that ended without an end event, after at least one step
    trained_s: float = 0.0  # by all earlier sessions, without their startup
    configured_s: float | None = None  # checkpoint.mean_hours_between_failures
    nodes: int = 1  # of the run, by which failures are assumed until some are seen

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]], configured_hours: float | None, nodes: int = 1) -> FailureHistory:
        """Counts the failures in the events of a run folder, which contain the running session's `started`.

        A session that was asked to end, also by Ctrl-C, or that a guard stopped, did not fail; one that died before its
        first step lost no work that a shorter interval would have saved.
        """
        failures, trained_s = 0, 0.0
        has_ended = True
        for event in events:
            if event.get("event") == "started":
                here_s = float(event.get("previous_s", 0.0)) - float(event.get("startup_s", 0.0))
                trained_s += max(0.0, here_s)
                failures += here_s > 0 and not has_ended
                has_ended = False
            elif event.get("event") in ENDS:
                has_ended = True
        return cls(failures, trained_s, configured_hours * 3600 if configured_hours else None, nodes)

    def mean_time_between_failures(self, running_s: float) -> tuple[float, str]:
        """Returns seconds and their source; `running_s`: how long this session has trained."""
        if self.configured_s is not None:
            return self.configured_s, "as configured"
        seen_s = self.trained_s + max(0.0, running_s)
        if self.failures:
            return max(seen_s, 1.0) / self.failures, f"observed: {self.failures} in {_format_s(seen_s)}"
        assumed_s = 3600 * mtbf_hours(DEFAULT_RATE, self.nodes)
        if seen_s > assumed_s:
            return seen_s, f"at most: none in {_format_s(seen_s)}"
        nodes = plural(self.nodes, "node")
        return assumed_s, f"assumed for {nodes}: none seen in {_format_s(seen_s)}"


class IntervalPlanner:
    """Decides after each step whether a save is due. It depends on clocks, so one rank decides for all.

    All time from call to call counts as training, except the time for which saves blocked: evaluations and self-checks
    would be repeated after a failure as well.
    """

    def __init__(
        self,
        history: FailureHistory,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        background: bool = True,
    ) -> None:
        """`report` gets a sentence with the interval whenever it changes noticeably; `clock` returns seconds.

        `background` is `checkpoint.background`: where training waits for a save, no save can begin during another.
        """
        self._history, self._report, self._clock, self._background = history, report, clock, background
        self._last_call: float | None = None  # of `step`
        self._running_s = self._since_save_s = self._reported_s = 0.0
        mean_s, _ = history.mean_time_between_failures(0.0)
        self._until_measured_s = min(FIRST_SAVE_S, FIRST_SAVE_SHARE * mean_s)
        self._step_s: deque[float] = deque(maxlen=50)
        self._blocked_s: deque[float] = deque(maxlen=RECENT_SAVES)
        self._duration_s: deque[float] = deque(maxlen=RECENT_SAVES)

    def step(self, step_s: float) -> bool:
        """Returns whether a save is due after a step that took `step_s`; must be called after every step.

        A due save counts as begun: if it fails, the next is due an interval later.
        """
        now = self._clock()
        passed_s = step_s if self._last_call is None else max(step_s, now - self._last_call)
        self._last_call = now
        self._step_s.append(passed_s)
        self._running_s += passed_s
        self._since_save_s += passed_s
        due_s = self.interval_s() if self._blocked_s else self._until_measured_s
        # now is nearer to the due time than after one more step
        is_due = self._since_save_s + step_s / 2 >= due_s
        if is_due:
            if not self._blocked_s:  # until one succeeds
                self._until_measured_s = min(2 * self._until_measured_s, LONGEST_INTERVAL_S)
            self.began()
        return is_due

    def began(self) -> None:
        """Records a save that has begun for another reason, such as the end of the run."""
        self._since_save_s = 0.0

    def saved(self, blocked_s: float, duration_s: float) -> None:
        """Records the time of a complete save: for which training was blocked, and in total."""
        self._running_s -= blocked_s  # which the neighbouring call of `step` counts as training
        self._since_save_s -= blocked_s
        self._blocked_s.append(blocked_s)
        self._duration_s.append(max(blocked_s, duration_s))
        interval_s = self.interval_s()
        if abs(interval_s - self._reported_s) > NOTICEABLE * self._reported_s:
            self._reported_s = interval_s
            self._report(self.sentence())

    def interval_s(self) -> float:
        """Returns the seconds of training between saves; needs a measured save."""
        mean_s, _ = self._history.mean_time_between_failures(self._running_s)
        return planned_interval_s(self._save(), mean_s)

    def _save(self) -> Save:
        blocked_s = median(self._blocked_s)
        return Save(blocked_s, max(self._duration_s) if self._background else blocked_s)

    def sentence(self) -> str:
        """Returns the interval with the numbers that it follows from."""
        mean_s, source = self._history.mean_time_between_failures(self._running_s)
        interval_s = self.interval_s()
        steps = max(1, round(interval_s / median(self._step_s))) if any(self._step_s) else 1
        bound = ", the longest" * (interval_s == LONGEST_INTERVAL_S)
        bound += ", the shortest that storage should bear" * is_for_storage(self._save(), mean_s)
        return (
            f"checkpoint.interval auto: a save every {_format_s(interval_s)} ({plural(steps, 'step')}){bound}, "
            f"because one blocks {_format_s(median(self._blocked_s))} and takes {_format_s(max(self._duration_s))},"
            f" and a failure is expected every {_format_s(mean_s)} ({source})"
        )


def _format_s(seconds: float) -> str:
    """Formats seconds: `6.67 min`, `6,000 h`; unlike `megalite.units.duration`, in hours also over days, as
    mean times between failures are configured."""
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{short(seconds / size)} {unit}"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1000:.2g} ms"
