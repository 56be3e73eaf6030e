"""The report of `megalite plan --html`: one page that holds the whole result, to read offline, print and pass on."""

from __future__ import annotations

from pathlib import Path

from launch.output import write_file
from launch.planning.report.content import report_content
from launch.planning.report.page import render_page
from megalite.planner.hardware import Cluster
from megalite.planner.search import SearchResult


def write_report(path: Path, result: SearchResult, cluster: Cluster, title: str) -> None:
    """Writes the report of a search that found a layout; its figures show the fastest one.

    Raises LaunchError where `path` cannot be written.
    """
    write_file(path, render_page(report_content(result, cluster, title)))
