"""Curves of one run or several, thinned to what a page can hold."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from launch.inspection.history import RunHistory
from launch.inspection.page.run_curves import curves_of, moving_mean
from launch.pages import skeleton
from launch.pages.curves import (
    MARKS,
    MOST_MARKS,
    MOST_POINTS,
    Chart,
    Curves,
    Mark,
    Series,
    chart_drawing,
    curves_data,
    grid_of,
    thin,
    thin_marks,
)

UPLOT = {  # of uPlot 1.6.32 as npm has it
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def curves(*series: Series) -> Curves:
    return Curves("c", "step", [Chart("chart", "Loss", "nats", series)])


def test_uplot_is_as_it_was_published() -> None:
    folder = Path(skeleton.FOLDER) / "uplot"
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == UPLOT


def test_no_spike_is_lost_and_no_step_counts_twice() -> None:
    """A thinned series has the mean, least and largest of the steps of each point, by plain Python."""
    x, y = np.arange(1.0, 10_001), np.sin(np.arange(10_000.0))
    y[[17, 9_999]], y[5_000] = 50.0, np.nan
    series = Series("loss", x, y)
    edges, places = grid_of(curves(series))
    found = thin(series, edges)
    assert len(edges) <= MOST_POINTS and places[-1] == 10_000
    bounds = [*edges.tolist(), np.inf]
    for place, (low, high) in enumerate(pairwise(bounds)):
        own = [b for a, b in zip(x.tolist(), y.tolist(), strict=True) if low <= a < high and b == b]
        assert found.mean[place] == pytest.approx(sum(own) / len(own))
        assert (found.least[place], found.largest[place]) == (min(own), max(own))
    assert np.nanmax(found.largest) == 50.0 and found.largest[-1] == 50.0


def test_runs_of_other_steps_share_one_axis_and_only_an_unknown_value_breaks_a_line() -> None:
    """A run that skipped a step has a gap there; one that never did that step has none."""
    one = Series("a", np.array([1.0, 2, 3, 4]), np.array([4.0, np.nan, 3, 2]))
    other = Series("b", np.array([1.0, 4]), np.array([9.0, 8]))
    sparse = Series("held out", np.array([1.0, 2, 4]), np.array([5.0, np.nan, 6]), is_sparse=True)
    data = curves_data(curves(one, other, sparse))
    assert data["x"] == [1, 2, 3, 4]
    lines = data["charts"][0]["lines"]
    assert [line["mean"] for line in lines] == [[4, None, 3, 2], [9, "", "", 8], [5, "", "", 6]]
    drawing = chart_drawing(curves(one, other, sparse), curves(one, other, sparse).charts[0])
    pieces = [len(node.get("points", "").split()) for node in drawing.iter("polyline")]
    assert pieces == [1, 2, 2, 2]


@pytest.mark.parametrize("y", [[], [np.nan], [0.0], [3.0], [-1.0, 1e17], [1e-300, 1e-200], [5.0] * 3])
@pytest.mark.parametrize("is_logarithmic", [False, True])
def test_any_values_can_be_drawn(y: list[float], is_logarithmic: bool) -> None:
    series = Series("a", np.arange(1.0, len(y) + 1), np.array(y), has_band=True)
    chart = Chart("chart", "Loss", "nats", [series], is_logarithmic)
    whole = Curves("c", "step", [chart])
    json.dumps(curves_data(whole), allow_nan=False)
    texts = " ".join(value for node in chart_drawing(whole, chart).iter() for value in node.attrib.values())
    assert "nan" not in texts and "inf" not in texts.replace("info", "")


def test_marks_of_a_kind_do_not_crowd_out_others() -> None:
    marks = [Mark(step, "save", "saved") for step in range(10_000)] + [Mark(3, "restart", "session 2 started")]
    kept = thin_marks(marks)
    assert set(MARKS) >= {mark.kind for mark in kept} == {"save", "restart"}
    assert MOST_MARKS / 2 < len(kept) <= MOST_MARKS + 1


def test_the_moving_mean_is_that_of_the_steps_around() -> None:
    y = np.array([1.0, 2, np.nan, 4, 5, 6])
    found = moving_mean(y, 3)
    expected = [np.nanmean(y[max(0, i - 1) : i + 2]) if y[i] == y[i] else np.nan for i in range(6)]
    assert found.tolist() == pytest.approx(expected, nan_ok=True)


def test_each_source_has_a_line_that_passes_over_steps_without_it(tmp_path: Path) -> None:
    """With a gap at each step that has no entry, a line would be dots."""
    told = {2: {"web": 3.0, "code": 5.0}, 4: {"web": 2.0}, 6: {"web": 1.0, "code": 4.0}}
    records = [
        {"step": step, "loss": 3.0}
        | ({"source_losses": told[step], "source_targets": dict.fromkeys(told[step], 7)} if step in told else {})
        for step in range(1, 7)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = curves_of(RunHistory.read(tmp_path))
    (chart,) = [chart for chart in found.charts if chart.id == "chart-source-losses"]
    assert {one.label: (one.x.tolist(), one.y.tolist()) for one in chart.series} == {
        "code": ([2, 6], [5.0, 4.0]),
        "web": ([2, 4, 6], [3.0, 2.0, 1.0]),
    }
    drawn = chart_drawing(found, chart)
    assert len(drawn.findall(".//polyline")) == 2, "an unbroken line for each"
    records = [{"step": step, "loss": 3.0} for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "chart-source-losses" not in {chart.id for chart in curves_of(RunHistory.read(tmp_path)).charts}
