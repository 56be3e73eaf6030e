"""Interim."""

from __future__ import annotations

from launch.inspection.history import RunHistory
from launch.inspection.page.run_curves import curves_of, curves_section
from launch.inspection.page.skeleton import render_page
from launch.inspection.status import RunStatus


def run_page(history: RunHistory, status: RunStatus, tail: str = "") -> str:
    """Returns the page."""
    curves = curves_of(history)
    return render_page(
        str(history.run_dir),
        status.state,
        {"step": f"{status.step:,}" if status.step else "0"},
        [status.reason],
        [curves_section(curves)],
        [curves],
        origin="",
        tail=tail,
    )
