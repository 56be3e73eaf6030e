"""`loss.png`: the loss of a run over its steps, drawn when the run ends."""

from __future__ import annotations

import logging
from io import BytesIO
from pathlib import Path
from typing import Any

from megalite.checkpoint.durable_files import write_durably
from megalite.config import Config
from megalite.monitor.observer import Observer
from megalite.monitor.sinks.jsonl import read_records

log = logging.getLogger(__name__)


class PlotSink(Observer):
    """Draws `loss.png` from metrics.jsonl at the end, also after a crash."""

    name = "loss.png"

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def close(self) -> None:
        picture = self._run_dir / "loss.png"
        plot_loss(read_records(self._run_dir / "metrics.jsonl"), picture, str(self._run_dir))
        log.info(f"drew {picture}")


def plot_loss(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws training and evaluation loss as PNG; skipped steps leave a gap."""
    from matplotlib import style

    with style.context("default"):  # a matplotlibrc of the current folder may be somebody else's, and ask for LaTeX
        picture = _draw(records, title)
    write_durably(path, picture)


def _draw(records: list[dict[str, Any]], title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=1.2, label="training")
    evaluated = [r for r in records if r.get("evaluation_loss") is not None]
    if evaluated:
        steps, losses = [r["step"] for r in evaluated], [r["evaluation_loss"] for r in evaluated]
        axes.plot(steps, losses, "o-", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def open_sink(config: Config, first_step: int) -> PlotSink | None:
    """Returns the plot if `monitor.plot`."""
    return PlotSink(config.run_dir) if config.monitor.plot else None
