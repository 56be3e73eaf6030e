"""The console: a live progress display on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from megalite.config import Config
from megalite.config.batch_stages import BatchSchedule
from megalite.monitor.observer import Observer
from megalite.monitor.progress import ALL_UP_TO, EVERY_S, RECENT_STEPS, clock, seconds_left
from megalite.monitor.records.step import StepRecord
from megalite.units import MIB, count, digits, gib, plural

BAR_COLUMNS = 16  # the numbers need the room


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Stops printing; rich would end the process, but the run goes on without a reader."""
        self.quiet = True


class ConsoleSink(Observer):
    """Prints the time and the numbers of a step every `log_interval` steps, of many short ones every EVERY_S, and the
    date when it changes."""

    def __init__(
        self, total_steps: int, first_step: int, log_interval: int, batches: BatchSchedule | None = None
    ) -> None:
        """Without `batches` all steps are alike."""
        self._total, self._interval, self._batches = total_steps, log_interval, batches
        self._first_step, self._shown_at = first_step, 0.0  # time.monotonic
        self._console = _Console()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._without_targets = 0  # steps so far
        self._date = ""
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(BAR_COLUMNS),
                MofNCompleteColumn(),
                # takes the room that the others leave, and is cut where that is too little
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
                expand=True,
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def on_start(self) -> None:
        self._print_date(time.localtime())

    def on_step(self, record: StepRecord) -> None:
        step = record["step"]
        self._recent_s.append(record["step_time_s"])
        if record["skipped"]:
            self._print(f"step {step} skipped: its gradients are not finite ({record['skipped_steps']} so far)")
        self._without_targets += record["loss"] == 0
        if record["loss"] == 0 and str(self._without_targets).rstrip("0") == "1":  # the 1st, 10th, 100th
            self._print(
                f"warning: step {step} has no loss, because none of its tokens carries one, and nothing is learned "
                f"from its samples ({plural(self._without_targets, 'such step')} so far)"
            )
        if "evaluation_loss" in record:
            sets = ", ".join(f"{name} {loss:.4f}" for name, loss in record.get("evaluation_losses", {}).items())
            self._print(f"step {step} evaluation loss {_loss(record['evaluation_loss'])}{sets and f' ({sets})'}")
        now = time.monotonic()
        if step != self._total and step - self._first_step > ALL_UP_TO and now - self._shown_at < EVERY_S:
            return
        steps = self._batches.steps_left(step, self._total) if self._batches is not None else self._total - step
        left = f"left {clock(seconds_left(steps, self._recent_s) or 0.0)}"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=f"{left} {step_numbers(record)}")
        elif step % self._interval == 0 or step == self._total:
            self._print(f"step {step}/{self._total} {step_numbers(record)} {left}")
        else:
            return
        self._shown_at = now

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _print(self, line: str) -> None:
        now = time.localtime()
        self._print_date(now)
        self._console.print(f"{time.strftime('%H:%M:%S', now)} {line}", highlight=False, markup=False, soft_wrap=True)

    def _print_date(self, now: time.struct_time) -> None:
        date = time.strftime("%Y-%m-%d, UTC%z", now)
        if date != self._date:
            self._date = date
            self._console.print(f"{time.strftime('%H:%M:%S', now)} {date}", highlight=False, markup=False)


def step_numbers(record: Mapping[str, Any]) -> str:
    """Formats the numbers of a step's record for one line, the important ones first; unknown ones are left out.

    The memory is the peak of rank 0, as its device counts it (`megalite.monitor.memory`).
    """
    numbers = [
        f"loss {_loss(record['loss'])}",
        f"grad {digits(record['grad_norm'])}",
        f"lr {record['learning_rate']:.2e}",
        f"{count(record['tokens_per_second'])} tokens/s",
    ]
    if (samples := record.get("samples_per_second")) is not None:
        numbers.append(f"{digits(samples)} samples/s")
    if (utilization := record.get("model_flops_utilization")) is not None:
        numbers.append(f"MFU {utilization:.1%}")
    if (peak_mib := record.get("memory_peak_mib")) is not None:
        numbers.append(gib(peak_mib * MIB))
    return " ".join(numbers)


def _loss(value: float) -> str:
    """Formats a loss; exactly 0 is that of samples without a target, which have none."""
    return f"{value:.4f}" if value else "-"


def open_sink(config: Config, first_step: int) -> ConsoleSink:
    """Returns the console of a run, which is always on."""
    return ConsoleSink(config.total_steps, first_step, config.monitor.log_interval, config.batches)
