"""The state and progress of a run at one moment, from the files in its folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from launch.checkpoints.listing import CHECKPOINTS
from launch.checkpoints.summary import sizes_text
from launch.inspection.run_files import Facts, RunFiles, known, listed, number, seconds_between, time_of
from launch.inspection.state import ENDINGS, RunState, Traces, infer_state, is_alive
from launch.supervision.supervisor import LOG, announced_restart
from megalite.checkpoint.manifest import STEP, find_latest, step_folders, step_of
from megalite.config import Config
from megalite.config.sections import WatchdogConfig
from megalite.monitor.events import EVENTS
from megalite.monitor.progress import RECENT_STEPS, seconds_left
from megalite.resilience.rank_registry import recorded_errors

WATCHED = 20  # steps and evaluations that the watchdog learns a limit from


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. Facts that are not known are None; times are in unix seconds, durations in seconds."""

    run_dir: Path
    state: RunState
    reason: str  # a sentence: what the state follows from
    step: int | None = None  # the last one on record
    total_steps: int | None = None
    loss: float | None = None  # of the last step that has one
    tokens_per_second: float | None = None  # median of recent steps of the last session, as the next three
    samples_per_second: float | None = None
    model_flops_utilization: float | None = None
    step_s: float | None = None  # from step to step, with all that comes between
    left_s: float | None = None  # until the run is done, while it makes progress
    goodput: float | None = None
    last_step: float | None = None  # when it ended
    last_activity: float | None = None
    checkpoint: int | None = None  # step of the newest complete one
    layout: str | None = None
    host: str | None = None
    process: int | None = None  # of rank 0
    sessions: int = 0
    without_record: Sequence[Sequence[int]] = ()  # first and last of steps that are done and not in metrics.jsonl
    events: Sequence[Facts] = ()
    problems: tuple[str, ...] = ()  # sentences: what could not be read

    @property
    def steps_at_risk(self) -> int | None:
        """Steps that are lost if the run dies now, or that its death has lost."""
        return None if self.step is None else max(0, self.step - (self.checkpoint or 0))


def read_status(run_dir: Path) -> RunStatus:
    """Reads the state and progress of a run. Raises OSError where its files cannot be read."""
    files = RunFiles.read(run_dir)
    session, own, holder = files.session, files.session_records, files.holder
    lives = is_alive(run_dir, holder, files.host)
    began, last = (time_of(session[0]), session[-1]) if session else (0.0, {})
    is_newer = holder is not None and holder.time > began
    is_starting = bool(is_newer and lives)  # the process that lives is a later one, which has not written anything yet
    if is_starting:
        own = []
    steps_s = seconds_between(own[-RECENT_STEPS:])
    dtype = files.config.precision.dtype if files.config is not None else None
    last_activity = max([*map(_ended, files.records[-1:]), *map(time_of, files.events[-1:])], default=0.0)
    endings = [event["event"] for event in session if event["event"] in ENDINGS]
    if not files.events and files.receipt.outcome.get("finished") is True:
        endings = ["ended"]
    # elsewhere, a lock that was taken after the end may be that of a command which found nothing left to do
    if holder is not None and (lives or (lives is None and not endings)):
        last_activity = max(last_activity, holder.time)
    state, reason = infer_state(
        Traces(
            is_alive=lives,
            since_last_write_s=max(0.0, time.time() - last_activity),
            limit_s=_limit_s(files, own, steps_s, is_saving=any((run_dir / CHECKPOINTS).glob(".step_*.tmp"))),
            has_started=bool(session or files.records),  # events may be damaged
            has_stepped=bool(own),
            is_evaluating=bool(own) and _is_evaluated(files, own[-1], 0),
            ending=endings[-1] if endings else None,
            unread="" if files.events else next((one for one in files.problems if EVENTS in one), ""),
            is_started_again=is_newer and lives is not None,
            restart=announced_restart(run_dir),
            failed_save=str(last.get("reason")) if last.get("event") == "save_failed" else "",
            error=_error(run_dir, since=holder.time if holder is not None else began),
            logs=_logs(run_dir),
        )
    )
    steps = known(files.records, "step")
    losses = [loss for loss in known(files.records, "loss") if loss]  # 0 is that of a step without targets
    step, total = (int(steps[-1]) if steps else None), _total_steps(session, files.config)
    left_s = None
    if state is RunState.RUNNING and step is not None and total is not None:
        left = files.config.batches.steps_left(step, total) if files.config is not None else max(0, total - step)
        left_s = seconds_left(left, steps_s)
    problems = list(files.problems)
    try:
        newest, passed_over = find_latest(run_dir / CHECKPOINTS)
        problems += passed_over if step_folders(run_dir / CHECKPOINTS) else []
        checkpoint = step_of(newest.name) if newest is not None and STEP.fullmatch(newest.name) else None
    except OSError as error:  # the rest of the run is told all the same
        problems.append(f"{run_dir / CHECKPOINTS} cannot be read: {error.strerror or error}")
        saved = [number(event.get("step")) for event in files.events if event["event"] == "saved"]
        checkpoint = int(saved[-1] or 0) if saved else None
    process = holder.process if holder is not None else number(session[0].get("process")) if session else None
    return RunStatus(
        run_dir=run_dir,
        state=state,
        reason=reason,
        step=step,
        total_steps=total,
        loss=losses[-1] if losses else None,
        tokens_per_second=_median(own, "tokens_per_second"),
        samples_per_second=_median(own, "samples_per_second"),
        model_flops_utilization=_median(own, "model_flops_utilization"),
        step_s=median(steps_s) if steps_s else None,
        left_s=left_s,
        goodput=number(files.records[-1].get("goodput")) if files.records else None,
        last_step=time_of(files.records[-1]) or None if files.records else None,
        last_activity=last_activity or None,
        checkpoint=checkpoint,
        layout=sizes_text(files.layout, dtype) if files.layout else None,
        host=files.host,
        process=int(process) if process is not None else None,
        sessions=sum(event["event"] == "started" for event in files.events) + is_starting,
        without_record=_without_record(files, step or 0, checkpoint or 0),
        events=files.events,
        problems=tuple(problems),
    )


def _without_record(files: RunFiles, step: int, checkpoint: int) -> list[list[int]]:
    """Returns the first and the last of steps that are done and have no record, as resumes found it and as it is."""
    found = [stretch for event in files.events for stretch in listed(event.get("without_record"))]
    now = [[step + 1, checkpoint]] if checkpoint > step else []
    pairs = [one for one in found + now if isinstance(one, list) and len(one) == 2 and all(map(number, one))]
    return [[int(first), int(last)] for first, last in dict.fromkeys(map(tuple, pairs))]


def _limit_s(files: RunFiles, own: Sequence[Facts], steps_s: Sequence[float], *, is_saving: bool) -> float:
    """Returns the longest silence of a run that makes progress: the watchdog's limits for all it may do now.

    The next record comes after the step and its evaluation; a save and a rollback are limited by storage.
    """
    watchdog = files.config.watchdog if files.config is not None else WatchdogConfig()
    limit_s = watchdog.limit_s(steps_s[-WATCHED:])
    if own and any(_is_evaluated(files, own[-1], later) for later in (0, 1)):
        limit_s += watchdog.limit_s(known(own, "evaluation_s")[-WATCHED:])
    if is_saving:
        limit_s += watchdog.limit_s(())
    recent = [event for event in files.session if own and time_of(event) >= time_of(own[-1])]
    if any(event["event"] == "intervened" and event.get("action") == "rollback" for event in recent):
        limit_s += watchdog.limit_s(())  # it loads a checkpoint
    return limit_s


def _is_evaluated(files: RunFiles, last: Facts, later: int) -> bool:
    """Returns whether the loop evaluates the step as much `later` than `last`, and no record says yet that it has."""
    interval = files.config.training.evaluation.interval if files.config is not None else 0
    step = number(last.get("step"))
    if interval == 0 or step is None or (not later and "evaluation_s" in last):
        return False
    return step + later == _total_steps(files.session, files.config) or (step + later) % interval == 0


def _error(run_dir: Path, since: float) -> str:
    """Returns a sentence on the error of the lowest rank that has left one since the last start."""
    for rank, error in recorded_errors(run_dir, since).items():
        return f"rank {rank} ended with {error}"
    return ""


def _logs(run_dir: Path) -> str:
    """Returns where the messages of the run's command and ranks are: those that its console lost are in its folder."""
    files = sorted(str(path) for pattern in (LOG, "console_rank_*.log") for path in run_dir.glob(pattern))
    return " and ".join(["the output of the command that started it", *files])


def _ended(record: Facts) -> float:
    """Returns when what a record tells of was over: its time is that of the step, before the evaluation."""
    return time_of(record) + sum(known([record], "evaluation_s"))


def _total_steps(session: Sequence[Facts], config: Config | None) -> int | None:
    """Returns the length of the run: as the last session counted it, else as the config has it.

    The config does not say how many steps of another batch size have contributed to `training.tokens`.
    """
    counted = number(session[0].get("total_steps")) if session else None
    if counted is not None:
        return int(counted)
    return config.total_steps if config is not None else None


def _median(records: Sequence[Facts], name: str) -> float | None:
    values = known(records[-RECENT_STEPS:], name)
    return median(values) if values else None


def as_json(status: RunStatus, last_events: int) -> dict[str, Any]:
    """Returns the facts as plain values for `--json`."""
    own = {name: value for name, value in vars(status).items() if name not in ("events", "problems")}
    return own | {
        "run_dir": str(status.run_dir),
        "state": str(status.state),
        "is_healthy": status.state.is_healthy,
        "last_step_age_s": None if status.last_step is None else max(0.0, time.time() - status.last_step),
        "steps_at_risk": status.steps_at_risk,
        "last_events": list(status.events)[-last_events:],
        "problems": list(status.problems),
    }
