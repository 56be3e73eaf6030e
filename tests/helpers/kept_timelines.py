"""The timelines of a step as a test reads them: all of them sound, or it fails."""

from __future__ import annotations

from pathlib import Path

from megalite.monitor.steps.timeline import RankTimeline, read_timeline, step_folder


def read_step(run_dir: Path, step: int) -> dict[int, RankTimeline]:
    """Returns the timelines of a step by rank. Raises ValueError, with a sentence that names the file, or OSError."""
    timelines = [read_timeline(path) for path in sorted(step_folder(run_dir, step).glob("rank_*.jsonl"))]
    return {timeline.owner.rank: timeline for timeline in timelines}
