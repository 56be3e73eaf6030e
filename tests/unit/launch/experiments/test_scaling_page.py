"""The page of `megalite scaling`, as headless Chromium lays it out without a network; and the files beside it."""

from __future__ import annotations

import csv
import json
from itertools import combinations
from pathlib import Path

import pytest

from launch.experiments.efficiency import ScalingPoint
from launch.experiments.measurement import RunMeasurement
from launch.experiments.scaling_page import log_ticks
from launch.experiments.scaling_report import ScalingReport
from tests.helpers.browser import Seen, look_at, photograph, why_no_browser
from tests.unit.launch.experiments.conftest import write_measured_run

HOSTILE = "</title><script>document.title = 'taken'</script> \"quoted\" & <b>bold</b>"
PIXEL = 0.6  # coordinates are written with two decimals


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ScalingReport:
    """Five points that lose more and more, and one that failed."""
    points = []
    for ranks in (1, 2, 4, 8, 16):
        parts = {
            "forward": 0.8 / ranks,
            "backward": 1.6 / ranks,
            "optimizer": 0.1 / ranks**1.2,  # the one part that becomes cheaper
            "gradient_sync": 0.02 * (ranks - 1),
            "pipeline_wait": 0.004 * (ranks - 1),
        }
        folder = tmp_path_factory.mktemp("runs") / "run"
        write_measured_run(folder, parts, data_parallel_size=ranks, global_batch_size=16, predicted_s=2.5 / ranks)
        points.append(ScalingPoint(f"{ranks} ranks", ranks, (RunMeasurement.read(folder, 2),)))
    return ScalingReport("strong", [*points, ScalingPoint(HOSTILE, 32, (), HOSTILE)], crowded=(16,))


@pytest.fixture(scope="module")
def written(report: ScalingReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report."""
    folder = tmp_path_factory.mktemp("report")
    report.write(folder, f"Scaling of {HOSTILE}")
    return folder


@pytest.fixture(scope="module")
def seen(written: Path) -> Seen:
    """The page, laid out."""
    if why := why_no_browser():
        pytest.skip(why)
    return look_at(written / "scaling.html")


def test_bars_are_as_wide_as_their_shares(seen: Seen, report: ScalingReport) -> None:
    scale = seen.elements["loss-chart"].width / 920 * 750  # of the drawing's units, from 0 to 100 %
    for place, one in enumerate(report.compared[1:]):
        boxes = {id_: box for id_, box in seen.elements.items() if id_.startswith(f"loss-{place}-")}
        assert sum(box.width for box in boxes.values()) == pytest.approx(scale, abs=PIXEL * len(boxes))
        for part in ("gradient_sync", "pipeline_wait"):
            expected = one.loss_by_part[part] * scale
            assert boxes[f"loss-{place}-{part}"].width == pytest.approx(expected, abs=PIXEL), (place, part)
        # what is left is the efficiency, less what the optimizer has won
        kept = one.efficiency + one.loss_by_part["optimizer"]
        assert boxes[f"loss-{place}-kept"].width == pytest.approx(kept * scale, abs=PIXEL)


def test_nothing_is_cut_and_no_words_overlap(seen: Seen, written: Path, tmp_path: Path) -> None:
    assert seen.cut == [] and seen.width <= 1120
    for a, b in combinations(seen.texts, 2):
        assert a.drawing != b.drawing or not a.overlaps(b), (a, b)
    assert photograph(written / "scaling.html", tmp_path / "page.png") == []


def test_the_page_says_what_the_numbers_do(seen: Seen, report: ScalingReport) -> None:
    for sentence in report.sentences()[1:]:
        assert sentence in seen.words
    # by hand: a step of 0.5136 s on 16 ranks against 2.5 s; 0.3 s of it synchronisation, 0.06 s waiting
    lost = "58 to gradient synchronisation, 12 to waiting for a neighbour"
    said = f"16 ranks: efficiency 30 %: of 70 points lost, {lost}"
    assert said in seen.words
    assert "OVERSUBSCRIBED: with 16 ranks there are more ranks than cores" in seen.words
    assert f"Scaling of {HOSTILE}" in seen.words and seen.scripts == 2, "texts of strangers are text"


def test_the_files_for_programs_hold_the_same(written: Path, report: ScalingReport) -> None:
    facts = json.loads((written / "scaling.json").read_text())
    rows = list(csv.DictReader((written / "scaling.csv").read_text().splitlines()))
    assert [point["ranks"] for point in facts["points"]] == [int(row["ranks"]) for row in rows] == [1, 2, 4, 8, 16]
    for point, row, one in zip(facts["points"], rows, report.compared, strict=True):
        assert float(row["efficiency"]) == point["efficiency"] == one.efficiency
        assert point["predicted_efficiency"] == pytest.approx(1.0)
    assert facts["kind"] == "strong" and facts["oversubscribed_ranks"] == [16]
    assert facts["failures"] == [{"name": HOSTILE, "reason": HOSTILE}]


@pytest.mark.parametrize("working", [0, 1])
def test_a_report_on_too_few_points_says_what_it_lacks(report: ScalingReport, working: int, tmp_path: Path) -> None:
    """As after Ctrl-C in the first or second run."""
    few = ScalingReport("weak", [*report.points[:working], ScalingPoint("4 ranks", 4, ())])
    few.write(tmp_path, "few")
    assert "an efficiency needs two points that have worked" in few.sentences()
    page = (tmp_path / "scaling.html").read_text()
    assert "Nothing is known: it takes two points" in page and "not run" in page


def test_ticks_of_a_logarithmic_axis_are_round() -> None:
    assert log_ticks(0.9, 24.0) == [1.0, 2.0, 5.0, 10.0, 20.0]
    assert log_ticks(30.0, 2e6) == [100.0, 1e3, 1e4, 1e5, 1e6]
