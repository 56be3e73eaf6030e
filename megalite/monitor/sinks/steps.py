"""`steps.jsonl`: what steps spent their time on, by pipeline stage; and a sentence about it at the end of the run."""

from __future__ import annotations

import logging
from statistics import fmean

from megalite.config import Config
from megalite.monitor.observer import Observer
from megalite.monitor.sinks.jsonl import JsonLinesSink
from megalite.monitor.steps.breakdown import StepBreakdown
from megalite.monitor.steps.parts import COMMUNICATION, PARTS

log = logging.getLogger(__name__)

STEPS = "steps.jsonl"
SMALLEST = 0.005  # share of a part that the sentence still names


class StepsSink(Observer):
    """Appends an entry every `monitor.log_interval` steps."""

    name = STEPS

    def __init__(self, lines: JsonLinesSink) -> None:
        self._lines = lines
        self._seconds = dict.fromkeys(PARTS, 0.0)  # of this session's steps
        self._idle: dict[int, list[float]] = {}  # by stage

    def on_breakdown(self, breakdown: StepBreakdown) -> None:
        for part, seconds in breakdown.parts_s.items():
            self._seconds[part] += breakdown.steps * seconds
        for stage in breakdown.stages:
            if stage.idle_ratio is not None:
                self._idle.setdefault(stage.stage, []).append(stage.idle_ratio)
        self._lines.on_step(breakdown.line())

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
            sentence += f"; pipeline idle {idle} by stage"
        log.info(sentence)


def open_sink(config: Config, first_step: int) -> StepsSink:
    """Opens steps.jsonl; drops entries of steps after `first_step`, which the run does again."""
    return StepsSink(JsonLinesSink(config.run_dir / STEPS, first_step))
