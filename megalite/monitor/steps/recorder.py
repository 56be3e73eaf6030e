"""Takes every step of this rank from its tape, and gathers what steps spent their time on to rank 0.

The window of a step reaches from the record of the step before to the record of this one, so that the logging, the
meeting and the save behind a step belong to the next one.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from megalite.config import Config
from megalite.distributed.hosts import this_host
from megalite.engine.engine import Engine
from megalite.engine.step_result import StepResult
from megalite.monitor.expert_usage import ExpertUsage, Usage
from megalite.monitor.memory import peak_memory_mib
from megalite.monitor.observer import Nonfatal
from megalite.monitor.progress import ALL_UP_TO, EVERY_S
from megalite.monitor.records.step import StepRecord
from megalite.monitor.steps.breakdown import COLUMN, KINDS, POSITION, ROW, StepBreakdown
from megalite.monitor.steps.communication_meter import CommunicationMeter
from megalite.monitor.steps.gathering import MEETINGS, Gathering
from megalite.monitor.steps.messages import Messages
from megalite.monitor.steps.parts import parts_of
from megalite.monitor.steps.profiler import StepProfiler
from megalite.monitor.steps.slow_ranks import SlowRank, SlowRanks
from megalite.monitor.steps.timeline import (
    Owner,
    RankTimeline,
    TimedNote,
    remove_steps,
    spans,
    steps_of,
    write_timeline,
)
from megalite.tracing.activity import Note, Operation, Phase
from megalite.tracing.tape import Collective, DeviceClock, Recorded, Tape

log = logging.getLogger(__name__)

PASSES = (Operation.FORWARD, Operation.BACKWARD, Operation.WEIGHT_GRADIENT)
REDUCED = POSITION["data", "reduce_scatter"]
MOST_WAITING = 1000  # records that are summed up at once: one step's at a time costs several times as much


class Gathered(NamedTuple):
    """The findings of rank 0 about the last steps."""

    breakdown: StepBreakdown
    changes: list[SlowRank]  # ranks that have become slow, or are so no longer
    experts: Usage

    def record(self) -> StepRecord:
        """Returns what it adds to the record of its step in metrics.jsonl."""
        return self.breakdown.record() | (StepRecord(experts=self.experts) if self.experts else {})


class StepRecorder:
    """Records the steps of this rank while it is open; opening it and `end_step` are collective.

    What fails here is reported, and the run goes on.
    """

    def __init__(self, engine: Engine, config: Config, first_step: int, group: dist.ProcessGroup | None) -> None:
        """`first_step` is the last one that is done; `group` is of all ranks on the CPU, None for a rank alone."""
        self._activity, self._config, self._first_step = engine.activity, config, first_step
        self._engine, self._owner = engine, _owner_of(engine)
        self._gathering = Gathering(self._owner, engine.mesh, group)
        self._expert_usage = ExpertUsage(engine, group)
        self._slow_ranks = SlowRanks(self._gathering.stages, self._gathering.hosts)
        self._meter = CommunicationMeter(engine)
        device_type = engine.deepspeed.device.type
        is_cuda = device_type == "cuda"
        self._tape = Tape(DeviceClock(lambda: torch.cuda.Event(enable_timing=True)) if is_cuda else None)
        # of each host, in case they share no file system
        self._is_first_of_host = self._gathering.hosts.index(self._owner.host) == self._owner.rank
        self.profiler = StepProfiler(config, self._owner.rank, device_type, cleans=self._is_first_of_host)
        self._row = np.zeros(len(ROW))
        self._windows: list[tuple[int, Recorded]] = []  # of the last steps, not yet in the row
        self._is_gathered, self._gathered_at = True, 0.0  # the coming step, if log_interval says so; time.monotonic
        self._messages, self._in_messages_s = Messages(), 0.0  # of the last step
        self._meetings: dict[int, float] = {}  # by step
        self._nonfatal = Nonfatal(log.warning)

    def __enter__(self) -> Self:
        if self._is_first_of_host:  # before any rank can have ended a step; perhaps of a run that had more ranks
            with self._nonfatal("earlier timelines"):
                run_dir = self._config.run_dir
                remove_steps(run_dir, (step for step in steps_of(run_dir) if step > self._first_step))
        self._meter.__enter__()
        self._activity.tape = self._tape
        return self

    def __exit__(self, *_: object) -> None:
        self._activity.tape = None
        self._meter.__exit__()
        self.profiler.close()

    def cut(self) -> None:
        """Ends the window of a step whose `end_step` comes when the next step has been begun."""
        with self._nonfatal("the record of a step"):
            self._tape.cut()

    def wishes(self, step: int, step_s: float) -> dict[str, bool]:
        """Returns what rank 0 wants of the step behind `step`, where each takes `step_s`: a profile that somebody has
        asked for, and to hear what steps went into."""
        is_due = step - self._first_step < ALL_UP_TO or time.monotonic() + step_s - self._gathered_at >= EVERY_S
        return {"profile_next": is_due and self.profiler.takes_request(), "gather_next": is_due}

    def after_barrier(self, step: int, *, profile_next: bool, gather_next: bool) -> None:
        """Notes that all ranks have met at the end of a step, and what they agreed on.

        They leave at about the same moment.
        """
        self.profiler.is_asked |= profile_next  # ranks may meet again before the coming step
        self._is_gathered |= gather_next
        self._meetings.pop(step, None)  # the last one is that of the step that is done again after a rollback
        self._meetings[step] = time.monotonic()
        if len(self._meetings) > MEETINGS:
            del self._meetings[next(iter(self._meetings))]

    def end_step(self, step: int, result: StepResult, *, is_last: bool) -> Gathered | None:
        """Takes the window that `cut` has ended, or else that the last record of activity ends.

        Every `monitor.log_interval` steps, of many short ones every EVERY_S, and in the last one gathers what has
        happened since, and returns it on rank 0. The host must have waited for the step.
        """
        self._messages, self._in_messages_s = Messages(), 0.0
        if self._owner.micro_batches != self._engine.micro_batches:  # another stage of the training has begun
            self._owner = self._owner.model_copy(update={"micro_batches": self._engine.micro_batches})
            self._gathering.expect_messages(self._owner)
        self._expert_usage.add(result)
        is_due = is_last or (self._is_gathered and step % self._config.monitor.log_interval == 0)
        with self._nonfatal("the record of a step"):
            self._windows.append((step, self._tape.take()))
            is_kept = self._is_kept(step, is_last=is_last)
            if is_due or is_kept or sum(len(window.entries) for _, window in self._windows) > MOST_WAITING:
                windows, self._windows = self._windows, []
                for number, window in windows:
                    self._take(number, window, is_kept=is_kept and number == step)
        self.profiler.end()
        if not is_due:
            return None
        self._is_gathered, self._gathered_at = False, time.monotonic()
        with self._nonfatal("the peak of memory"):
            self._row[COLUMN["memory_peak_mib"]] = peak_memory_mib()
        self._activity.record_op(Operation.MEET, peers=self._activity.peers.everyone)
        self._split_waiting(self._gathering.waited(self._messages, self._row[COLUMN["met"]]))
        rows, experts = self._gathering.to_rank_0(self._row), self._expert_usage.gather()
        self._row = np.zeros(len(ROW))
        self._activity.record_op(Operation.BEGIN)
        if rows is None:
            return None
        with self._nonfatal("the breakdown of steps"):
            clocks = self._gathering.clocks(rows[:, COLUMN["met"]].tolist())
            breakdown = StepBreakdown.of(step, rows, self._gathering.stages, clocks, self._gathering.hosts)
            return Gathered(breakdown, self._slow_ranks.add(breakdown.steps, breakdown.own_s), experts)
        return None

    def _take(self, step: int, recorded: Recorded, *, is_kept: bool) -> None:
        notes, ended = [Note(*entry) for entry in recorded.entries[:-1]], recorded.entries[-1][0]
        collectives, timed = sorted(recorded.collectives), list(spans(notes, ended))
        row, seconds = self._row, parts_of(timed, collectives)
        row[COLUMN["steps"]] += 1
        row[COLUMN["wall_s"]] += ended - notes[0].time
        row[COLUMN["met"]] = next(reversed(self._meetings.values()), 0.0)
        row[COLUMN["data"] : COLUMN["other"] + 1] += list(seconds.values())
        self._messages, self._in_messages_s = Messages.of(timed, self._owner.stage), seconds["pipeline_transfer"]
        in_step = [span for span in timed if span.note.phase is Phase.STEP]
        passes = [span for span in in_step if span.note.operation in PASSES]
        if passes:
            row[COLUMN["began"]], row[COLUMN["ended"]] = passes[0].start, passes[-1].end
            row[COLUMN["busy_s"]] = sum(span.seconds for span in passes)
        self._count(in_step, collectives)
        if is_kept:
            self._keep(
                RankTimeline(
                    self._owner, step, ended, time.time(), notes, collectives, recorded.is_cut, dict(self._meetings)
                )
            )

    def _keep(self, timeline: RankTimeline) -> None:
        """Writes a timeline, if this rank is to have one, after the oldest ones have made room."""
        run_dir, options = self._config.run_dir, self._config.monitor.timeline
        if self._is_first_of_host:
            others = [step for step in steps_of(run_dir) if step != timeline.step]
            remove_steps(run_dir, others[: max(0, len(others) + 1 - options.keep)])
        if options.ranks == "all" or self._owner.rank in options.ranks:
            write_timeline(run_dir, timeline)

    def _count(self, in_step: list[TimedNote], collectives: list[Collective]) -> None:
        """Adds up the communication of a training step."""
        sums = [[0.0, 0.0, 0.0] for _ in KINDS]  # calls, bytes, seconds
        for one in collectives:
            if in_step and in_step[0].start <= one.began < in_step[-1].end:
                of_kind = sums[POSITION.get((one.axis, one.operation), len(KINDS) - 1)]
                of_kind[0] += not one.is_wait
                of_kind[1] += one.size
                if not (one.is_wait and one.axis == "pipeline"):  # those are told from waiting for the neighbour
                    of_kind[2] += one.seconds
        # on streams of its own: only what the step waits for holds it up
        sums[REDUCED][2] = sum(one.seconds for one in in_step if one.note.operation is Operation.REDUCE_GRADIENTS)
        self._row[-3 * len(KINDS) :] += np.ravel(sums)

    def _split_waiting(self, waited_s: float) -> None:
        """Divides the time blocked in messages into waiting and transfer, as it was in the last step."""
        both_s = self._row[COLUMN["pipeline_transfer"]]
        share = min(1.0, waited_s / self._in_messages_s) if self._in_messages_s > 0 else 0.0
        self._row[COLUMN["pipeline_wait"]] += share * both_s
        self._row[COLUMN["pipeline_transfer"]] -= share * both_s
        # blocked in messages is who sends as well: what sends took is not told again as time of receptions
        self._row[COLUMN["pipeline receive seconds"]] = max(
            0.0, (1 - share) * both_s - self._row[COLUMN["pipeline send seconds"]]
        )

    def _is_kept(self, step: int, *, is_last: bool) -> bool:
        """Returns whether timelines of a step are kept.

        A power of ten is a multiple of most intervals of evaluations and saves; the step behind it is of none.
        """
        options = self._config.monitor.timeline
        is_power_of_ten = any(each >= 10 and str(each).strip("0") == "1" for each in (step, step - 1))
        is_multiple = options.every > 0 and step % options.every == 0
        return is_last or is_power_of_ten or is_multiple or step in options.steps


def _owner_of(engine: Engine) -> Owner:
    layout, at, (host, boot) = engine.layout, engine.coordinate, this_host()
    return Owner(
        rank=dist.get_rank(),
        stage=at.pipeline_rank,
        data=at.replica,
        tensor=at.tensor_rank,
        host=host,
        boot=boot or host,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        data_parallel_size=layout.data_parallel_size,
        schedule=layout.pipeline_schedule,
        chunks=layout.pipeline_chunks,
        micro_batches=engine.micro_batches,
        context_parallel_size=layout.context_parallel_size,
        expert_parallel_size=layout.expert_parallel_size,
    )
