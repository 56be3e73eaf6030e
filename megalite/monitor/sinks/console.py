"""The console: a live progress display on a terminal, plain lines otherwise."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megalite.config import Config
from megalite.monitor.observer import Observer


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Stops printing; rich would end the process, but the run goes on without a reader."""
        self.quiet = True


class ConsoleSink(Observer):
    """Prints loss, gradient norm, tokens per second and time left, every `log_interval` steps."""

    def __init__(self, total_steps: int, first_step: int, log_interval: int) -> None:
        self._total, self._first, self._interval = total_steps, first_step, log_interval
        self._console = _Console()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._seconds: list[float] = []
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def on_step(self, record: dict[str, Any]) -> None:
        step = record["step"]
        self._seconds = [*self._seconds[-49:], record["step_time_s"]]
        if record["skipped"]:
            self._print(f"step {step} skipped: its gradients are not finite ({record['skipped_steps']} so far)")
        if "evaluation_loss" in record:
            self._print(f"step {step} evaluation loss {record['evaluation_loss']:.4f}")
        numbers = (
            f"loss {record['loss']:.4f} grad_norm {record['grad_norm']:.3f} lr {record['learning_rate']:.2e} "
            f"{record['tokens_per_second']:,.0f} tokens/s"
        )
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=numbers)
        elif step % self._interval == 0 or step == self._total:
            left = sum(self._seconds) / len(self._seconds) * (self._total - step)
            self._print(f"step {step}/{self._total} {numbers} left {int(left) // 60}:{int(left) % 60:02d}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def open_sink(config: Config, first_step: int) -> ConsoleSink:
    """Returns the console of a run, which is always on."""
    return ConsoleSink(config.total_steps, first_step, config.monitor.log_interval)
