"""`megalite compare`: planted differences are found at their step; what need not agree is no failure."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from launch.cli.app import main
from launch.inspection.comparison import TOLERANCE, Comparison, compare
from launch.inspection.comparison_report import as_json, conclusion, differences_table, sentences, verdict
from launch.inspection.history import RunHistory
from launch.inspection.page.comparison_page import comparison_page
from tests.helpers.browser import look_at, photograph, why_no_browser
from tests.unit.launch.inspection.conftest import MakeRun

Change = Callable[[dict[str, Any]], object]  # of a step's record
FORWARD, BACKWARD = 0.3, 0.2


@pytest.fixture
def run(make_run: MakeRun) -> Callable[..., Path]:
    """Makes a run of 60 steps of the same training, each record changed by `change`."""

    def make(
        name: str,
        change: Change = lambda record: None,
        steps: int = 60,
        receipt: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Path:
        folder = make_run(name=name, steps=steps, ending="ended")
        path = folder / "receipt.json"
        known = json.loads(path.read_text()) | {"data_fingerprint": "f00d", "seed": 0} | dict(receipt or {})
        path.write_text(json.dumps({key: value for key, value in known.items() if value is not None}))
        config = yaml.safe_load((folder / "config.yaml").read_text())
        for option, value in (options or {}).items():
            section, _, key = option.rpartition(".")
            (config[section] if section else config)[key] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        lines = []
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "time": 1.7e9 + step,
                "loss": 4 - step / 100,
                "grad_norm": 1.0 + 0.01 * (step % 7),
                "learning_rate": 1e-3 * min(1.0, step / 10),
                "tokens_seen": 128 * step,
                "step_time_s": 0.5,
                "tokens_per_second": 256.0,
                "wall_s": 0.5,
                "parts_s": {"forward": FORWARD, "backward": BACKWARD},
            }
            change(record)
            lines.append(json.dumps(record) + "\n")
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    return make


def compared(*folders: Path, tolerance: float | None = None) -> Comparison:
    return compare({folder.name: RunHistory.read(folder) for folder in folders}, tolerance)


def loss_off_by(step: int, relative: float) -> Change:
    """Plants a difference at a step and at all later ones."""

    def change(record: dict[str, Any]) -> None:
        if record["step"] >= step:
            record["loss"] *= 1 + relative

    return change


@pytest.mark.parametrize("step", [1, 2, 37, 60])
def test_the_first_step_beyond_the_tolerance_is_found(run: Callable[..., Path], step: int) -> None:
    first = run("one")
    above = compared(first, run("above", loss_off_by(step, 1.1 * TOLERANCE["fp32"]))).pairs[0]
    below = compared(first, run("below", loss_off_by(step, 0.9 * TOLERANCE["fp32"]))).pairs[0]
    assert above.beyond is not None and above.beyond.step == step and above.fails and verdict(above) == "differs"
    assert above.beyond.first == pytest.approx(4 - step / 100)
    assert above.beyond.relative == pytest.approx(1.1 * TOLERANCE["fp32"], rel=1e-2)
    assert f"from step {step} on" in conclusion(above)
    assert (
        below.beyond is None and below.agrees and not below.fails and "at all 60 steps: they agree" in conclusion(below)
    )
    assert below.largest is not None and below.largest.step >= step, "told although it is no failure"


def test_the_largest_difference_is_not_the_first_one(run: Callable[..., Path]) -> None:
    def change(record: dict[str, Any]) -> None:
        record["loss"] *= {20: 1.01, 40: 0.9}.get(record["step"], 1.0)
        record["grad_norm"] *= 3.0 if record["step"] == 12 else 1.0
        if record["step"] % 30 == 0:
            record["evaluation_loss"] = 3.0 + (0.3 if record["step"] == 60 else 0.0)

    def evaluated(record: dict[str, Any]) -> None:
        if record["step"] % 30 == 0:
            record["evaluation_loss"] = 3.0

    pair = compared(run("one", evaluated), run("other", change)).pairs[0]
    assert pair.beyond is not None and pair.beyond.step == 20
    assert pair.largest is not None and (pair.largest.step, round(pair.largest.relative, 6)) == (40, 0.1)
    assert pair.gradient_norm is not None and pair.gradient_norm.step == 12
    assert pair.gradient_norm.relative == pytest.approx(2 / 3), "of the larger one"
    assert pair.evaluation is not None and (pair.evaluation.step, pair.evaluation.first) == (60, 3.0)


def test_a_loss_that_is_no_number_in_one_run_alone_is_a_difference(run: Callable[..., Path]) -> None:
    """JSON has null for it; a comparison of numbers alone would pass over that step."""

    def lost(record: dict[str, Any]) -> None:
        if record["step"] == 33:
            record["loss"] = None

    first, other = run("one"), run("other", lost)
    pair = compared(first, other).pairs[0]
    assert pair.beyond is not None and pair.beyond.step == 33 and pair.fails
    assert math.isinf(pair.beyond.relative) and "no number" in conclusion(pair)
    assert json.loads(json.dumps(as_json(compared(other, run("third", lost))), default=str))["differs"] is False


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"receipt": {"data_fingerprint": "beef"}}, "learned from other data"),
        ({"receipt": {"seed": 7}}, "other seeds, 0 and 7"),
        (
            {"change": lambda record: record.update(tokens_seen=256 * record["step"])},
            "numbers of tokens from step 1 on",
        ),
        ({"change": lambda record: record.update(learning_rate=2e-3)}, "other rates from step 1 on"),
        ({"options": {"optimizer.weight_decay": 0.5}}, "same rule: optimizer.weight_decay"),
        ({"receipt": {"data_fingerprint": None}}, "data fingerprint of other is not known"),
    ],
)
def test_runs_that_need_not_agree_never_fail(run: Callable[..., Path], what: dict[str, Any], told: str) -> None:
    def change(record: dict[str, Any]) -> None:
        record["loss"] *= 1.5
        what.get("change", lambda record: None)(record)

    kept = {key: value for key, value in what.items() if key != "change"}
    found = compared(run("one"), run("other", change, **kept), tolerance=1e-9)
    assert not found.fails and verdict(found.pairs[0]) == "need not agree"
    assert told in conclusion(found.pairs[0]) and "from step 1 on" in conclusion(found.pairs[0])


def test_a_layout_alone_is_no_excuse(run: Callable[..., Path]) -> None:
    other = run(
        "other",
        loss_off_by(10, 0.1),
        options={"parallel": {"tensor_parallel_size": 2}, "monitor": {"log_interval": 7}},
        receipt={"layout": {"tensor_parallel_size": 1}},
    )
    found = compared(run("one"), other)
    assert found.fails
    differing = {option.name: option.values for option in found.options}
    assert differing == {"parallel.tensor_parallel_size": (1, 2), "monitor.log_interval": (1, 7)}


def test_options_that_follow_from_others_are_not_listed(run: Callable[..., Path]) -> None:
    """A dense model's width of experts is that of its feed-forward network, which nobody has set."""
    found = compared(run("one"), run("other", options={"model.intermediate_size": 99}))
    assert [option.name for option in found.options] == ["model.intermediate_size"]


def test_the_tolerance_is_that_of_the_coarser_format(run: Callable[..., Path]) -> None:
    coarse = run("coarse", loss_off_by(5, 2 * TOLERANCE["fp32"]), options={"precision": {"dtype": "bf16"}})
    pair = compared(run("fine"), coarse).pairs[0]
    assert pair.tolerance == TOLERANCE["bf16"] and pair.agrees
    assert compared(run("again"), coarse, tolerance=1e-3).pairs[0].fails


def test_a_gradient_spike_before_is_named(run: Callable[..., Path]) -> None:
    """Rounding that one step magnifies a thousand times is no fault of a layout."""

    def spike(record: dict[str, Any]) -> None:
        record["grad_norm"] *= 70.0 if record["step"] == 19 else 1.0

    def spike_and_part(record: dict[str, Any]) -> None:
        spike(record)
        loss_off_by(22, 0.1)(record)

    pair = compared(run("one", spike), run("other", spike_and_part)).pairs[0]
    assert pair.spike is not None and pair.spike.step == 19 and pair.fails
    assert "at step 19, which magnifies differences of rounding" in conclusion(pair)
    assert compared(run("calm"), run("calm2", loss_off_by(22, 0.1))).pairs[0].spike is None


def test_speed_and_parts_are_those_of_most_steps(run: Callable[..., Path]) -> None:
    def twice_as_fast(record: dict[str, Any]) -> None:
        is_first = record["step"] == 1  # it compiles and warms up
        forward = FORWARD / 2
        record |= {"step_time_s": 9.0 if is_first else 0.25, "tokens_per_second": 1.0 if is_first else 512.0}
        record["parts_s"] = {"forward": 8.0 if is_first else forward, "backward": BACKWARD, "tensor_collectives": 0.01}
        record["wall_s"] = 0.4

    found = compared(run("one"), run("fast", twice_as_fast))
    assert found.pairs[0].step_speed == pytest.approx(2) and found.pairs[0].token_speed == pytest.approx(2)
    assert next(iter(found.parts)) == "forward" and found.parts["forward"] == pytest.approx((FORWARD, FORWARD / 2))
    assert found.parts["tensor_collectives"] == (None, pytest.approx(0.01))

    # on another layout since step 30, whose speed is not that of the steps before
    def slow_until_30(record: dict[str, Any]) -> None:
        if record["step"] <= 30:
            record |= {"step_time_s": 5.0, "parts_s": {"pipeline_wait": 5.0}}

    with ((resumed := run("resumed", slow_until_30)) / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.8e9, "event": "started", "step": 30}) + "\n")
    last = compared(run("steady"), resumed).runs[1]
    assert last.step_s == pytest.approx(0.5)
    assert last.parts_s == {"forward": pytest.approx(FORWARD), "backward": pytest.approx(BACKWARD)}


def test_lengths_restarts_and_runs_without_steps_are_said(run: Callable[..., Path], make_run: MakeRun) -> None:
    first, short, unborn = run("one"), run("short", steps=20), run("unborn", steps=10)
    with (short / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.8e9, "event": "started", "step": 10}) + "\n")
    (unborn / "metrics.jsonl").write_text("")
    found = compared(first, short, unborn)
    told = "\n".join(sentences(found))
    assert "one has 60 steps and short 20: 20 are compared" in told
    assert "short was resumed 1 time" in told and "unborn has made no step" in told
    assert found.pairs[0].agrees and found.pairs[0].steps == 20
    assert found.pairs[1].fails, "a check that compares nothing has not passed"
    assert "no step to compare" in conclusion(found.pairs[1])


def test_damaged_files_are_said_and_compared_as_far_as_they_go(run: Callable[..., Path]) -> None:
    first, other = run("one"), run("other")
    with (other / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 61, "loss": 3.0\n\xff\xfe[1]\nnull\n{"step": "x"}\n')
    (other / "config.yaml").write_text("{]")
    (other / "receipt.json").write_bytes(b"\0")
    found = compared(first, other)
    told = "\n".join(sentences(found))
    assert "receipt.json cannot be read" in told and "config.yaml" in told
    assert found.pairs[0].steps == 60 and not found.fails and "is not known" in told
    assert comparison_page(found).startswith("<!DOCTYPE html>")


def test_all_are_held_against_the_first(run: Callable[..., Path]) -> None:
    """The second and the third agree with each other, and neither with the first."""
    off = loss_off_by(30, 0.05)
    found = compared(run("one"), run("two", off), run("three", off), run("four"))
    assert [verdict(pair) for pair in found.pairs] == ["differs", "differs", "agrees"]
    assert len(differences_table(found).rows) == 3 and found.fails


def command(*words: object) -> int:
    with patch.object(sys, "argv", ["megalite", "compare", *map(str, words)]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_ends_with_a_verdict(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, same, other = run("a/run"), run("b/run"), run("c/run", loss_off_by(17, 0.1))
    assert command(first, same) == 0
    assert "they agree" in capsys.readouterr().out
    page = tmp_path / "compare.html"
    assert command(first, other, "-o", page) == 1
    told = capsys.readouterr().out
    assert "from step 17 on" in told and "a/run" in told and "c/run" in told, "names that tell the runs apart"
    assert page.read_text().count("<section") >= 5
    assert command(first, other, "--tolerance", "0.2") == 0
    capsys.readouterr()
    assert command(first, other, "--json") == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["differs"] and facts["against_first"][0]["first_beyond"]["step"] == 17


def test_mistakes_are_one_sentence(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = run("one")
    for words, told in (
        ([first], "give the folders of two runs or more"),
        ([first, tmp_path / "none"], "does not exist"),
        ([first, first / "../one"], "is given twice"),
        ([first, run("two"), "--tolerance", "nan"], "--tolerance nan"),
        ([first, run("three"), "-o", tmp_path / "no" / "compare.html"], "cannot be written"),
        ([first, tmp_path], "is no folder of a run"),
        ([first, run("four"), "-o", first / "metrics.jsonl"], "is no page that megalite has written"),
        ([first, run("five"), "-o", tmp_path / "r.pdf"], "a page is HTML: name it"),
    ):
        assert command(*words) == 2
        said = capsys.readouterr().err
        assert told in said and len(said.strip().splitlines()) == 1, said


HOSTILE = "</script><script>document.title='owned'</script>&\x1b]0;owned\x07\u202e"


def test_names_and_options_of_strangers_are_shown_as_text(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = run("one")
    other = run(HOSTILE.replace("/", "_"), options={"data.path": f"{HOSTILE} hf_{'a' * 30}"})
    assert command(first, other, "-o", tmp_path / "compare.html") == 0
    shown, page = capsys.readouterr().out, (tmp_path / "compare.html").read_text()
    for text in (shown, page):
        assert "\x1b" not in text and "\u202e" not in text and f"hf_{'a' * 30}" not in text
    assert page.count("<script") == 2 and "<script>document" not in page


def test_the_page_shows_its_curves_and_says_nothing_on_the_console(run: Callable[..., Path], tmp_path: Path) -> None:
    if reason := why_no_browser():
        pytest.skip(reason)
    page = tmp_path / "compare.html"
    page.write_text(comparison_page(compared(run("one"), run("other", loss_off_by(17, 0.1)), run("third"))))
    assert photograph(page, tmp_path / "page.png") == []
    for width in (500, 1120):  # the narrowest window that Chromium has
        seen = look_at(page, (width, 3200))
        assert seen.width <= width, f"the page must be scrolled sideways at {width} pixels"
    bars = [seen.elements[f"{name}-forward"] for name in ("one", "other", "third")]
    assert bars[0].width == pytest.approx(bars[1].width, abs=0.6) and bars[0].width > 100
    assert bars[0].width / seen.elements["one-backward"].width == pytest.approx(FORWARD / BACKWARD, rel=0.01)
