"""Draws `loss.png`: the loss of a run over its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_loss(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws training and evaluation loss; skipped steps leave a gap."""
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
    figure.savefig(path, dpi=120)
