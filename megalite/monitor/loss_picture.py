"""`loss.png`: the loss of a run over its steps."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any

from megalite.checkpoint.durable_files import write_durably
from megalite.monitor.line_files import stream_blocks
from megalite.monitor.sinks.jsonl import METRICS

FILE = "loss.png"
DRAWN_BYTES = 1 << 24  # of metrics.jsonl; of a longer one, lines are left out at even distances


def draw_loss(run_dir: Path, picture: Path) -> None:
    """Draws what metrics.jsonl of a run holds."""
    metrics = run_dir / METRICS
    every = 1 + metrics.stat().st_size // DRAWN_BYTES
    blocks = stream_blocks(metrics, every=every, always=(b'"evaluation_loss"',))
    plot_loss(chain.from_iterable(blocks), picture, str(run_dir))


def plot_loss(records: Iterable[dict[str, Any]], path: Path, title: str) -> None:
    """Draws training and evaluation loss as PNG; skipped steps leave a gap."""
    from matplotlib import style

    with style.context("default"):  # a matplotlibrc of the current folder may be somebody else's, and ask for LaTeX
        picture = _draw(records, title)
    write_durably(path, picture)


def _draw(records: Iterable[dict[str, Any]], title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = [(r["step"], r.get("loss") or nan, r.get("evaluation_loss")) for r in records if "step" in r]
    axes.plot([step for step, *_ in points], [loss for _, loss, _ in points], linewidth=1.2, label="training")
    if evaluated := [(step, loss) for step, _, loss in points if loss is not None]:
        axes.plot(*zip(*evaluated, strict=True), "o-", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
