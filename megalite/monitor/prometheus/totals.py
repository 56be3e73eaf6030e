"""Counts and last values of a run, over all its sessions.

Counters must not fall when a run starts again, or `rate()` takes that for a reset and invents a burst. So they go on
from what was shown last, which every scrape and every save keeps in `prometheus_counters.json`, and from what has been
written to metrics.jsonl, steps.jsonl and events.jsonl since, read before a resume drops what it does again.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from megalite.checkpoint.durable_files import write_durably
from megalite.checkpoint.safe_files import read_small_file
from megalite.monitor.events import EVENTS, read_events
from megalite.monitor.goodput import CATEGORIES
from megalite.monitor.prometheus.families import (
    COUNTED,
    EMPTY_BUCKETS,
    FAILED,
    OUTCOMES,
    SAVED,
    STEP_SECONDS_SUM,
    Labels,
    Series,
    Values,
    bucket_of,
)
from megalite.monitor.records.step import GAUGES
from megalite.monitor.sinks.jsonl import METRICS, stream_records
from megalite.monitor.sinks.steps import STEPS

SHOWN = "prometheus_counters.json"
LONGEST_BYTES = 1 << 24  # of that file
COUNTED_UP_TO = "counted_up_to"  # in that file: the last step that is in the counts, and when it was counted
OF_EVENTS = {"megalite_checkpoint_saves_total", "megalite_interventions_total"}  # counted from all events each time
REMEMBERED_SAVES = 20
LARGEST = 1e18  # of a number that is believed
ACTIONS = ("skip", "rollback", "stop")  # of guards
_Stored = TypeAdapter(dict[str, list[tuple[tuple[str, ...], FiniteFloat]]])


class RunTotals:
    """Adds up what a run does; series are replaced and never changed, so that another thread may read them."""

    def __init__(self, last_step: int = 0) -> None:
        """`last_step` is the step from which the session goes on."""
        self._last_step = last_step
        self._saved_at: deque[float] = deque(maxlen=REMEMBERED_SAVES)
        self._values: dict[str, Series] = {
            "megalite_tokens_total": {(): 0.0},
            "megalite_samples_total": {(): 0.0},
            "megalite_steps_total": {(outcome,): 0.0 for outcome in OUTCOMES},
            "megalite_step_seconds": EMPTY_BUCKETS,
            STEP_SECONDS_SUM: {(): 0.0},
            "megalite_run_seconds_total": {(category,): 0.0 for category in CATEGORIES},
            "megalite_checkpoint_saves_total": {(SAVED,): 0.0, (FAILED,): 0.0},
            "megalite_checkpoint_blocked_seconds_total": {(): 0.0},
            "megalite_interventions_total": {(action,): 0.0 for action in ACTIONS},
        }

    @classmethod
    def of_run(cls, run_dir: Path, resumed_step: int, tokens_of_a_step: int, samples_of_a_step: int) -> RunTotals:
        """Goes on with the counts of a run's earlier sessions.

        Call it when the session's `started` event is written and nothing is dropped from metrics.jsonl yet. The sizes
        of a step count for steps that earlier sessions have lost, which no file holds any more. Raises OSError.
        """
        events, shown, totals = read_events(run_dir / EVENTS), _shown_before(run_dir / SHOWN), cls()
        counted = shown.pop(COUNTED_UP_TO, {})
        last, when = (_number(counted.get((key,))) for key in ("step", "time"))
        for name in set(shown) - OF_EVENTS if counted else ():
            totals._values[name] = {**totals._values.get(name, {}), **shown[name]}
        for event in events:
            totals._count_event(event, is_new=_number(event.get("time")) > when)
        later = [event for event in events if counted and _number(event.get("time")) > when]
        returns = [event for event in later if event["event"] in ("started", "rolled_back")]
        back = [_number(event.get("to_step", event.get("step"))) for event in returns]
        on_record, beyond = 0, 0
        for record in stream_records(run_dir / METRICS, after_step=min([last, *back])):
            step = _number(record.get("step"))
            if step > last or _number(record.get("time")) > when or not counted:
                totals._count_step(record)
                on_record += 1
                beyond += step > resumed_step
        lost = sum(_number(event.get("lost_steps")) for event in events)
        totals.raise_to("megalite_steps_total", {("lost",): lost})
        if counted:
            dropped = _dropped_since(later, last, beyond)
            totals._add("megalite_steps_total", {("taken",): dropped})
        else:
            dropped = max(0.0, lost - beyond)
            skipped: Series = {("skipped",): shown.get("megalite_steps_total", {}).get(("skipped",), 0.0)}
            totals.raise_to("megalite_steps_total", skipped)
            done = on_record + dropped - totals._values["megalite_steps_total"]["skipped",]
            totals.raise_to("megalite_steps_total", {("taken",): done})
        totals._add("megalite_tokens_total", {(): dropped * tokens_of_a_step})
        totals._add("megalite_samples_total", {(): dropped * samples_of_a_step})
        for line in stream_records(run_dir / STEPS, after_step=last):
            with suppress(AttributeError, KeyError, TypeError):  # a line that no run has written
                totals.add_line(line)
        for name, series in shown.items():
            totals.raise_to(name, series)
        totals._last_step = resumed_step
        return totals

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Takes the record of a step that has just ended."""
        step = int(record["step"])
        if step <= self._last_step:
            self._add("megalite_steps_total", {("lost",): self._last_step - step + 1})
        self._last_step = step
        self._count_step(record)
        self._have_counted()
        for key in GAUGES.keys() & record.keys():
            self._values[GAUGES[key].name] = {(): math.nan if record[key] is None else float(record[key])}

    def add_source_losses(self, losses: Mapping[str, float | None]) -> None:
        """Takes the last training loss of each source that has one."""
        known = self._values.get("megalite_source_loss_nats", {})
        new: Series = {(name,): math.nan if loss is None else float(loss) for name, loss in losses.items()}
        self._values["megalite_source_loss_nats"] = {**known, **new}

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Takes an entry of steps.jsonl."""
        parts: dict[Labels, float] = {}
        idle: dict[Labels, float] = {}
        communication: dict[str, dict[Labels, float]] = {"seconds": {}, "bytes": {}, "calls": {}}
        steps = _number(line.get("steps"))
        for stage in line["stages"]:
            number = str(int(_number(stage.get("stage"))))
            parts |= {(number, part): steps * _number(value) for part, value in stage.get("mean_s", {}).items()}
            if stage.get("idle_ratio") is not None:
                idle[(number,)] = _number(stage["idle_ratio"])
            for one in stage.get("communication", []):
                for what, series in communication.items():
                    series[number, str(one["axis"]), str(one["operation"])] = steps * _number(one[what])
        self._add("megalite_step_part_seconds_total", parts)
        for what, series in communication.items():
            self._add(f"megalite_communication_{what}_total", series)
        if idle:
            self._values["megalite_pipeline_idle_ratio"] = idle

    def add_save(self, when: float, *, is_complete: bool) -> None:
        """Counts a save that ended at `when`, in unix seconds."""
        self._add("megalite_checkpoint_saves_total", {(SAVED if is_complete else FAILED,): 1.0})
        if not is_complete:
            return
        self._saved_at.append(when)
        self._values["megalite_checkpoint_last_timestamp_seconds"] = {(): when}
        if gaps := [after - before for before, after in pairwise(self._saved_at)]:
            self._values["megalite_checkpoint_interval_seconds"] = {(): max(0.0, median(gaps))}

    def add_intervention(self, action: str) -> None:
        """Counts an intervention of a guard."""
        self._add("megalite_interventions_total", {(action,): 1.0})

    def add_blocked(self, seconds: float) -> None:
        """Adds time in which training waited for a save."""
        self._add("megalite_checkpoint_blocked_seconds_total", {(): seconds})

    def add_end(self, blocked_s: float) -> None:
        """Counts what training waited for saves at the end of a session."""
        self.add_blocked(blocked_s)
        self._have_counted()

    def _have_counted(self) -> None:
        """Notes what is in the counts: also the events of the last step or of the end, which are written before."""
        self._values[COUNTED_UP_TO] = {("step",): float(self._last_step), ("time",): time.time()}

    def raise_to(self, name: str, series: Series) -> None:
        """Raises counts to these where they are lower."""
        old = self._values.get(name, {})
        self._values[name] = {**old, **{key: max(value, old.get(key, 0.0)) for key, value in series.items()}}

    def values(self) -> Values:
        """Returns all series as they are now; later changes do not reach them."""
        return dict(self._values)

    def _count_step(self, record: Mapping[str, Any]) -> None:
        seconds, samples = _number(record.get("step_time_s")), record.get("samples")
        ends = samples if isinstance(samples, Sequence) and len(samples) == 2 else (0, 0)
        self._add("megalite_steps_total", {("skipped" if record.get("skipped") else "taken",): 1.0})
        tokens = round(_number(record.get("tokens_per_second")) * seconds)
        self._add("megalite_tokens_total", {(): tokens})
        self._add("megalite_samples_total", {(): max(0.0, _number(ends[1]) - _number(ends[0]))})
        self._add("megalite_step_seconds", {bucket_of(seconds): 1.0})
        self._add(STEP_SECONDS_SUM, {(): seconds})
        self.add_blocked(_number(record.get("save_blocked_s")))

    def _count_event(self, event: Mapping[str, Any], *, is_new: bool) -> None:
        """Counts an event; what it says of time in saves only if it `is_new`: not yet among what was shown."""
        name = event.get("event")
        if name in ("saved", "save_failed"):
            self.add_save(_number(event.get("time")), is_complete=name == "saved")
        elif name == "intervened" and event.get("action") in ACTIONS:
            self.add_intervention(event["action"])
        elif is_new and "save_blocked_s" in event:
            self.add_blocked(_number(event["save_blocked_s"]))

    def _add(self, name: str, amounts: Series) -> None:
        old = self._values.get(name, {})
        self._values[name] = {**old, **{key: old.get(key, 0.0) + amount for key, amount in amounts.items()}}


def _dropped_since(later: Sequence[Mapping[str, Any]], last: float, beyond: int) -> float:
    """Returns the number of steps that were done after step `last` was counted, and that no file holds any more.

    `later` are the events since, the `started` of this session last, which finds `beyond` of them still on record.
    """
    dropped, waiting = 0.0, float(beyond)
    for event in later:
        first = _number(event.get("step")) + (event["event"] == "started")
        lost = _number(event.get("lost_steps"))
        if lost:
            dropped += max(0.0, first + lost - 1 - max(last, first - 1))
            last = min(last, first - 1)
    return max(0.0, dropped - waiting)


def keep_shown(path: Path, values: Values) -> None:
    """Writes the counters among `values` for the next session. Raises OSError."""
    stored = {name: list(series.items()) for name, series in values.items() if name in COUNTED or name == COUNTED_UP_TO}
    write_durably(path, json.dumps(stored).encode())


def _shown_before(path: Path) -> dict[str, Series]:
    """Returns what an earlier session has shown; nothing if it has shown nothing, or the file is damaged."""
    try:
        stored = _Stored.validate_json(read_small_file(path, LONGEST_BYTES))
    except (OSError, ValidationError):
        return {}
    return {
        name: {key: value for key, value in series if 0 <= value < LARGEST}
        for name, series in stored.items()
        if name in COUNTED or name == COUNTED_UP_TO
    }


def _number(value: Any) -> float:
    """Returns a number from a file or record; 0 for what is none, negative or not of this world."""
    return float(value) if isinstance(value, int | float) and 0 <= value < LARGEST else 0.0
