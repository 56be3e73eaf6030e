"""What rank 0 does with each checkpoint beside the training: a copy on the mirror, a Hugging Face folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.exporter import Exporter, exports_of
from launch.reporter import Reporter
from launch.resume import Start, checkpoints_of
from megalite.config import Config

if TYPE_CHECKING:
    from megalite.checkpoint.mirror import Mirror


@dataclass(frozen=True)
class Followers:
    """Those that the config names; none on other ranks than the first."""

    mirror: Mirror | None = None
    exporter: Exporter | None = None

    @classmethod
    def open(cls, config: Config, start: Start, reporter: Reporter) -> Followers:
        """For rank 0; what an interrupted run has not come to is done now."""
        mirror, exporter = None, None
        own = start.checkpoint if start.is_resume else None
        if config.checkpoint.mirror is not None:
            from megalite.checkpoint.mirror import Mirror
            from megalite.checkpoint.retention import Retention

            mirror = Mirror(config.checkpoint.mirror, Retention.of(config.checkpoint), reporter.mirrored)
            if own is not None:
                mirror.offer(own)
        if config.checkpoint.export_hf != "off":
            exporter = Exporter(config, reporter)
            if own is not None and not (exports_of(config) / own.name).exists():
                exporter.offer(own)
        return cls(mirror, exporter)

    def close(self, config: Config, reporter: Reporter, *, is_done: bool, at_most_s: float = math.inf) -> None:
        """Waits for what is on its way: for the mirror up to `checkpoint.mirror_wait_minutes` and `at_most_s`, for an
        export only where the run `is_done`; the next session starts it again."""
        if self.exporter is not None:
            self.exporter.close(is_done=is_done)
        seconds = min(60 * config.checkpoint.mirror_wait_minutes, at_most_s)
        if self.mirror is not None and not self.mirror.close(seconds):
            reporter.say(
                f"{config.checkpoint.mirror} has not got the last checkpoint in {seconds / 60:.3g} minutes: it is in "
                f"{checkpoints_of(config)}, and the next run sends it"
            )
