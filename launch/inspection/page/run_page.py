"""The page of one run: `megalite report`, and `report.html` in its folder. No torch."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from launch.inspection.history import RunHistory
from launch.inspection.page.explanation_sections import prediction_section, waterfall_section
from launch.inspection.page.goodput_bar import goodput_section
from launch.inspection.page.page_data import PageData
from launch.inspection.page.rank_layout import layout_section
from launch.inspection.page.rank_memory import memory_section
from launch.inspection.page.ranks_timeline import timeline_section
from launch.inspection.page.run_curves import curves_of, curves_section
from launch.inspection.page.sentences import sentences_of
from launch.inspection.page.step_parts import parts_section, stages_section
from launch.inspection.page.tables import communication_section, events_section, settings_section, versions_section
from launch.inspection.page.tiles import tiles_of
from launch.inspection.status import read_status
from launch.output import write_file
from launch.pages.curves import Curves
from launch.pages.sections import PageSection
from launch.pages.skeleton import render_page
from launch.pages.svg import at_one_width

FILE = "report.html"
LARGEST_BYTES = 400_000
TOO_MANY = "Its numbers are too many for this page."


def write_run_page(run_dir: Path, path: Path, step: int | None = None) -> None:
    """Writes the page of a run, with the timeline of `step` or of a usual step that has one.

    Raises OSError where the run's steps or events cannot be read, LaunchError where `path` cannot be written.
    """
    written = time.strftime(", %Y-%m-%d %H:%M:%S UTC", time.gmtime())
    found = PageData.of(RunHistory.read(run_dir), read_status(run_dir), step)
    write_file(path, run_page(found, written=written))


def run_page(found: PageData, *, written: str = "", tail: str = "") -> str:
    """Returns the page as HTML; `written` says when, `tail` is as in `render_page`."""
    curves = curves_of(found.history)
    run_dir = found.history.run_dir
    sections, has_narrow = run_sections(found, curves), True
    while True:
        page = render_page(
            title_of(run_dir),
            subtitle_of(found),
            tiles_of(found),
            sentences_of(found),
            sections,
            [curves],
            origin=f"megalite report {run_dir}{written}",
            tail=tail,
        )
        sizes = [0 if one.table is None else sum(1 for _ in one.table.iter()) for one in sections]
        if len(page.encode()) <= LARGEST_BYTES or not (has_narrow or any(sizes)):
            return page
        if has_narrow:
            has_narrow, sections = False, [replace(one, figure=at_one_width(one.figure)) for one in sections]
            continue
        place = sizes.index(max(sizes))
        sections[place] = replace(sections[place], table=None, caption=f"{sections[place].caption} {TOO_MANY}")


def title_of(run_dir: Path) -> str:
    """Returns a name of the run that tells it from others of a folder: the last two parts of its path."""
    return "/".join(part for part in run_dir.resolve().parts[-2:] if part != "/") or str(run_dir)


def subtitle_of(found: PageData) -> str:
    """Returns the model, the layout and the folder in a line."""
    config, status = found.history.files.config, found.status
    parts = [str(found.history.run_dir)]
    if config is not None:
        model = config.model
        parts.insert(0, f"{model.model_type}, {model.num_hidden_layers} blocks of width {model.hidden_size:,}")
    if status.layout:
        parts.insert(1, status.layout)
    if status.host:
        parts.append(f"rank 0 on {status.host}")
    return "; ".join(parts)


def run_sections(found: PageData, curves: Curves) -> list[PageSection]:
    """Returns the figures and tables in the order of the page."""
    return [
        curves_section(curves),
        parts_section(found),
        stages_section(found),
        timeline_section(found),
        waterfall_section(found),
        prediction_section(found),
        memory_section(found),
        communication_section(found),
        goodput_section(found),
        layout_section(found),
        events_section(found),
        settings_section(found),
        versions_section(found),
    ]
