"""Output of `megalite status` and `megalite ls`: sentences and a table. No torch.

Names and values come from files that anyone may have made: control characters in them are escaped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from data_pipeline.storage.paths import decimal_size
from launch.checkpoints.report import age_text
from launch.inspection.listing import RunSummary
from launch.inspection.run_files import Facts, time_of
from launch.inspection.state import RunState
from launch.inspection.status import RunStatus
from launch.output import Table, styled
from megalite.checkpoint.manifest import printable
from megalite.monitor.goodput import format_steps_without_record
from megalite.monitor.progress import clock, format_continuation
from megalite.units import count, digits, percent, plural, seconds

SHOWN_EVENTS = 5
EVENT_COLUMNS = 100  # of the facts of one event
# facts of events that only the account of goodput needs
ACCOUNT = {
    *("time", "event", "before_s", "previous_s", "startup_s", "down_s", "paused_s", "lost_s", "last_dropped"),
    *("session_s", "goodput", "blocked_s", "save_blocked_s", "total_s", "account", "unrecorded_s", "without_record"),
}


def status_lines(status: RunStatus) -> Iterator[str]:
    """Yields the state and progress of a run as lines of text; what is not known is left out."""
    yield f"{printable(str(status.run_dir))}: {status.state}: {printable(status.reason)}"
    lines = {
        "progress": progress_text(status),
        "speed": speed_text(status),
        "checkpoint": _checkpoint(status),
        "layout": status.layout or "",
        "process": _process(status),
    }
    for name, text in lines.items():
        if text:
            yield f"{name + ':':<13}{printable(text)}"
    for place, event in enumerate(status.events[-SHOWN_EVENTS:]):
        yield f"{'' if place else 'events:':<13}{printable(_event(event))}"
    for sentence in format_steps_without_record(status.without_record):
        yield f"records:     {sentence}"
    for problem in status.problems:
        yield f"not read:    {printable(problem)}"


def progress_text(status: RunStatus) -> str:
    """Returns how far a run is, when its last step ended, and its loss; empty if nothing is known."""
    if status.step is None:
        return f"0 of {plural(status.total_steps, 'step')}" if status.total_steps else ""
    of = f" of {status.total_steps:,} ({percent(status.step / status.total_steps)})" if status.total_steps else ""
    ended = f", which ended {_ago(status.last_step)}" if status.last_step is not None else ""
    loss = f"; loss {status.loss:.4f}" if status.loss is not None else ""
    return f"step {status.step:,}{of}{ended}{loss}"


def speed_text(status: RunStatus) -> str:
    """Returns how fast a run is and how long it will take; empty if nothing is known."""
    parts = []
    if status.tokens_per_second is not None:
        parts.append(f"{count(status.tokens_per_second)} tokens/s")
    if status.samples_per_second is not None:
        parts.append(f"{digits(status.samples_per_second)} samples/s")
    if status.step_s is not None:
        parts.append(f"{seconds(status.step_s)} from step to step")
    if status.model_flops_utilization is not None:
        parts.append(f"MFU {percent(status.model_flops_utilization)}")
    if status.goodput is not None:
        parts.append(f"goodput {percent(status.goodput)}")
    if status.left_s is not None:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + status.left_s))
        parts.append(f"{clock(status.left_s)} left, until {until}")
    return ", ".join(parts)


def _checkpoint(status: RunStatus) -> str:
    if status.step is None:
        return ""
    newest = f"step {status.checkpoint:,}" if status.checkpoint is not None else "none"
    at_risk = status.steps_at_risk
    if not at_risk:
        lost = "nothing would be lost"
    elif status.state in (RunState.RUNNING, RunState.WAITING):
        lost = f"{plural(at_risk, 'step')} would be lost now"
    else:
        lost = f"{plural(at_risk, 'step')} {'has' if at_risk == 1 else 'have'} to be done again"
    goes_on = "" if status.state.is_healthy else f"; {format_continuation(status.checkpoint)}"
    return f"{newest}: {lost}{goes_on}"


def _process(status: RunStatus) -> str:
    if status.host is None:
        return ""
    process = f"process {status.process} on " if status.process is not None else ""
    return f"{process}{status.host}" + (f", session {status.sessions}" if status.sessions else "")


def _fact(value: Any) -> str:
    """Returns a fact of an event in words: changes of options as `option 2 -> 1`."""
    changes = value if isinstance(value, list) else [value]
    if all(isinstance(one, dict) and {"option", "before", "after"} <= one.keys() for one in changes):
        return ", ".join(f"{one['option']} {one['before']} -> {one['after']}" for one in changes)
    return str(value)


def _event(event: Facts) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_of(event)))
    facts = ", ".join(
        f"{name} {_fact(value)}" for name, value in event.items() if name not in ACCOUNT and value is not None
    )
    return f"{at} {event['event']}" + (f": {facts[:EVENT_COLUMNS]}" if facts else "")


def runs_table(runs: Sequence[RunSummary]) -> Table:
    """Builds a table with a row per run, those that need somebody in red."""
    columns = ("run", "state", "step", "loss", "layout", "last activity", "checkpoints")
    rows = []
    for run in runs:
        status = run.status
        total = f"/{status.total_steps:,}" if status.total_steps is not None else ""
        cells: list[Any] = [
            run.name,
            status.state if status.state is not RunState.UNREADABLE else f"unreadable: {status.reason}",
            f"{status.step or 0:,}{total}",
            f"{status.loss:.4f}" if status.loss is not None else "",
            status.layout or "",
            _ago(status.last_activity),
            decimal_size(run.checkpoint_bytes) if run.checkpoint_bytes else "",
        ]
        needs_somebody = status.state in (RunState.HUNG, RunState.FAILED, RunState.STOPPED, RunState.UNREADABLE)
        rows.append(styled((printable(str(cell)) for cell in cells), "red" if needs_somebody else None))
    return Table(columns, rows, text_columns=[0, 1, 4, 5])


def _ago(moment: float | None) -> str:
    """Formats how long ago something was; `just now` also for a clock that is a little ahead."""
    if moment is None:
        return ""
    age_s = time.time() - moment
    return "just now" if -60 < age_s < 1 else age_text(age_s) + (" ago" if age_s >= 1 else "")
