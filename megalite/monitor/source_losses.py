"""The training loss by source in the records of a run: means over the steps since the last entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.config import Config
from megalite.monitor.records.step import StepRecord

if TYPE_CHECKING:
    from megalite.engine.step_result import StepResult  # pulls in torch, which readers of metrics.jsonl do not need

MOST_SOURCES = 32  # that are told at every entry; a line of more would outgrow all else in it
RARELY = 100  # steps between entries about more

Sums = Mapping[str, tuple[float, int]]  # by source: the losses of its tokens in nats, and its valid targets


def is_told(sources: int, step: int, total_steps: int, interval: int = 1) -> bool:
    """Returns whether the record of a step tells of each source, where fewer sources are told every `interval`."""
    return step % (interval if sources <= MOST_SOURCES else RARELY) == 0 or step == total_steps


class SourceLossMeans:
    """Adds up the losses of the steps that were taken, by source, until a record tells of them.

    The sums are equal on all ranks, and go with a checkpoint: a resumed run tells what the uninterrupted one would.
    """

    def __init__(self, config: Config, sums: Sums) -> None:
        """`sums` are those of the checkpoint from which the run goes on."""
        self._names = sorted(config.data.sources)  # the order in which micro-batches number them
        self._interval, self._total_steps = config.monitor.log_interval, config.total_steps
        self._sums = {name: sums[name] for name in self._names if name in sums}

    def state(self) -> dict[str, tuple[float, int]]:
        """Returns the sums that no record has told yet, for a checkpoint."""
        return dict(self._sums)

    def add(self, result: StepResult) -> None:
        """Adds a step whose result is read, if it was taken."""
        sums = result.readback.source_losses
        if sums is None or not result.taken:
            return
        for name, loss, targets in zip(self._names, *sums.tolist(), strict=True):
            if targets:
                loss_before, targets_before = self._sums.get(name, (0.0, 0))
                self._sums[name] = loss_before + loss, targets_before + int(targets)

    def record(self, step: int) -> StepRecord:
        """Returns `source_losses` and `source_targets` for the record of a step that tells of them, and forgets them.

        A source without a valid target since the last entry has none in either.
        """
        if not self._sums or not is_told(len(self._names), step, self._total_steps, self._interval):
            return {}
        sums, self._sums = self._sums, {}
        return {
            "source_losses": {name: loss / targets for name, (loss, targets) in sums.items()},
            "source_targets": {name: targets for name, (_, targets) in sums.items()},
        }
