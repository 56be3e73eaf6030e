"""`steps.jsonl`: what steps spent their time on, by pipeline stage; and a sentence about it at the end of the run."""

from __future__ import annotations

import logging
from statistics import fmean

from megalite.config import Config
from megalite.config.layout import unchecked_layout
from megalite.monitor.observer import Observer
from megalite.monitor.sinks.jsonl import JsonLinesSink
from megalite.monitor.steps.breakdown import StepBreakdown
from megalite.monitor.steps.parts import COMMUNICATION, PARTS
from megalite.schedules.simulation import PipelineTimes, idle_of_equal_stages
from megalite.schedules.tables import Schedule

log = logging.getLogger(__name__)

STEPS = "steps.jsonl"
SMALLEST = 0.005  # share of a part that the sentence still names


class StepsSink(Observer):
    """Appends an entry every `monitor.log_interval` steps."""

    name = STEPS

    def __init__(self, config: Config, lines: JsonLinesSink) -> None:
        self._config, self._lines, self._ranks = config, lines, 1
        self._seconds = dict.fromkeys(PARTS, 0.0)  # of this session's steps
        self._idle: dict[int, list[float]] = {}  # by pipeline stage, of the steps since the batch has changed
        self._batches = config.batches
        self._shape = self._batches.stretches[0].shape

    def on_breakdown(self, breakdown: StepBreakdown) -> None:
        for part, seconds in breakdown.parts_s.items():
            self._seconds[part] += breakdown.steps * seconds
        self._ranks = len(breakdown.stage_of_ranks)
        if (shape := self._batches.shape_after(breakdown.step - 1)) != self._shape:
            self._idle, self._shape = {}, shape
        for stage in breakdown.stages:
            if stage.idle_ratio is not None:
                self._idle.setdefault(stage.stage, []).append(stage.idle_ratio)
        self._lines.on_step(breakdown.line())

    def sync(self) -> None:
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        wall = sum(self._seconds.values())
        if wall <= 0:
            return
        shares = {part: seconds / wall for part, seconds in self._seconds.items()}
        largest = sorted(PARTS, key=lambda part: -shares[part])
        named = ", ".join(f"{PARTS[part]} {shares[part]:.0%}" for part in largest if shares[part] >= SMALLEST)
        sentence = f"a step went into: {named}; communication {sum(shares[part] for part in COMMUNICATION):.0%}"
        if self._idle:
            idle = " / ".join(f"{fmean(ratios):.0%}" for _, ratios in sorted(self._idle.items()))
            sentence += f"; pipeline idle {idle} by stage (the schedule's own: {self._own_idle():.0%})"
        log.info(sentence)

    def _own_idle(self) -> float:
        """Returns the idle share of the span that the schedule alone has, with equal stages and free messages."""
        layout = unchecked_layout(self._config, self._ranks)
        stages, micro_batches = layout.pipeline_parallel_size, self._shape.micro_batches(layout.data_parallel_size)
        times = PipelineTimes(forward_s=(1.0,) * stages, backward_s=(2.0,) * stages)
        schedule = Schedule(layout.pipeline_schedule)
        idle_s = idle_of_equal_stages(schedule, times, micro_batches, layout.pipeline_chunks)
        return idle_s / (idle_s + micro_batches * 3.0)


def open_sink(config: Config, first_step: int) -> StepsSink:
    """Opens steps.jsonl; drops entries of steps after `first_step`, which the run does again."""
    return StepsSink(config, JsonLinesSink(config.run_dir / STEPS, first_step))
