"""`megalite plan --html`: one page that holds the whole answer, to read offline, to print, and to pass on."""

from __future__ import annotations

from pathlib import Path

from launch.plan.output import write_file
from launch.plan.report.facts import facts_of
from launch.plan.report.page import page_of
from megalite.planner.hardware import Cluster
from megalite.planner.search import SearchResult


def write_report(path: Path, result: SearchResult, cluster: Cluster, title: str) -> None:
    """`result` has a layout that fits; the first one is drawn. Raises LaunchError where `path` cannot be written."""
    write_file(path, page_of(facts_of(result, cluster, title)))
