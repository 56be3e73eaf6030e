"""The page of `megalite report`, as headless Chromium lays it out without a network."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import psutil
import pytest

from launch.cli.app import main
from launch.errors import USER_ERROR_CODE
from launch.inspection.history import RunHistory
from launch.inspection.page.page_data import PageData
from launch.inspection.page.ranks_timeline import joined
from launch.inspection.page.run_page import write_run_page
from launch.inspection.page.tables import hide_arguments, settings_section
from launch.inspection.status import read_status
from launch.inspection.timelines import read_kept_step
from launch.trainer import run_pictures
from launch.trainer.run_pictures import RunPictures
from megalite.monitor.goodput import CATEGORIES
from megalite.units import percent
from tests.helpers.browser import Seen, look_at, photograph, why_no_browser
from tests.helpers.commands import command_line
from tests.helpers.devtools import open_page
from tests.helpers.recorded_runs import KEPT_STEP, config_of, write_run
from tests.unit.launch.planning.report.test_report import HOSTILE

PIXEL = 0.6  # coordinates are written with two decimals
LARGEST_PAGE = 400_000
SIZE = (1120, 6400)


@pytest.fixture(scope="session")
def browser() -> None:
    """Skips, and says why, where there is no browser."""
    if reason := why_no_browser():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder)
    write_run_page(folder, folder / "report.html")
    return folder


@pytest.fixture(scope="module")
def seen(browser: None, run_dir: Path) -> Seen:
    return look_at(run_dir / "report.html", SIZE)


def without_scripts(page: Path, target: Path) -> Path:
    """A copy as a viewer shows it that runs no script."""
    source = page.read_text(encoding="utf-8")
    stripped = re.sub(r"<script.*?</script>", "", source, flags=re.DOTALL)
    assert len(stripped) < len(source) - 50_000
    target.write_text(stripped, encoding="utf-8")
    return target


def check_labels(seen: Seen, drawings: set[str], least: float) -> None:
    """None lies on another, is lower than so many pixels, or leaves its drawing."""
    shown = [text for text in seen.texts if text.width > 0]
    assert {text.drawing for text in shown} == drawings
    for name in drawings:
        around, texts = seen.elements[name], [text for text in shown if text.drawing == name]
        for text in texts:
            assert around.x - 1 <= text.x and text.right <= around.right + 1, (name, text)
            assert around.y - 1 <= text.y and text.bottom <= around.bottom + 1, (name, text)
            assert text.height >= least, (name, text)
        assert [(one.text, other.text) for one, other in combinations(texts, 2) if one.overlaps(other)] == [], name


FIGURES = {
    *("parts-area", "stages-bars", "timeline-drawing", "what-if-drawing", "prediction-drawing", "memory-drawing"),
    "layout-drawing",
}
CHARTS = {
    *("chart-loss", "chart-grad-norm", "chart-learning-rate", "chart-tokens-per-second", "chart-step-time-s"),
    *("chart-goodput", "chart-memory-peak-mib"),
}


@pytest.mark.slow
def test_numbers_on_the_page_are_those_of_the_run(seen: Seen, run_dir: Path) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    receipt = json.loads((run_dir / "receipt.json").read_text())
    tiles = seen.elements["tiles"].text
    for value in ("ended", f"{records[-1]['loss']:.4f}", "40step of 40", "41.2 %MFU"):
        assert value in tiles, value
    assert f"{percent(receipt['goodput']['goodput'])}goodput" in tiles
    assert "rank 1 on node is slow" in seen.elements["sentences"].text
    assert "The plan said 115 ms a step, it took 300 ms" in seen.elements["sentences"].text
    spent = receipt["goodput"]["seconds"]
    whole = seen.elements["goodput-drawing"].width
    for name in ("productive", "startup", "lost"):
        box = seen.elements[f"goodput-{name}"]
        assert box.width == pytest.approx(whole * spent[name] / sum(spent.values()), abs=PIXEL)
        assert CATEGORIES[name] in box.text
    for rank, one in enumerate(receipt["measured"]["ranks"]):
        bar, mark = seen.elements[f"memory-{rank}"], seen.elements[f"memory-predicted-{rank}"]
        predicted = receipt["prediction"]["memory"][rank // 2]["peak_mib"]
        assert (mark.x - bar.x) / bar.width == pytest.approx(predicted / one["peak_mib"], abs=0.002)


@pytest.mark.slow
def test_bars_of_stages_are_as_wide_as_their_shares(seen: Seen, run_dir: Path) -> None:
    line = json.loads((run_dir / "steps.jsonl").read_text().splitlines()[-1])
    pixels_per_s = seen.elements["stage-0-forward"].width / 0.05
    for stage in line["stages"]:
        right = None
        for name, value in stage["mean_s"].items():
            box = seen.elements[f"stage-{stage['stage']}-{name}"]
            assert box.width == pytest.approx(value * pixels_per_s, abs=PIXEL), name
            if name in ("backward", "pipeline_wait", "optimizer"):
                assert box.x == pytest.approx(right, abs=PIXEL), name
            right = box.right


@pytest.mark.slow
def test_every_box_of_the_timeline_is_a_record_of_its_rank(seen: Seen, run_dir: Path) -> None:
    timelines = read_kept_step(run_dir, KEPT_STEP).aligned.timelines
    assert len(timelines) == 4
    began = min(timeline.began for timeline in timelines.values())
    first = next(iter(timelines[0].spans()))
    origin, pixels_per_s = seen.elements["box-0-0"].x, seen.elements["box-0-0"].width / first.seconds
    drawn = 0
    for rank, timeline in timelines.items():
        for index, span in enumerate(timeline.spans()):
            box = seen.elements.get(f"box-{rank}-{index}")
            if box is None:
                assert span.seconds * pixels_per_s <= PIXEL
                continue
            drawn += 1
            assert box.x == pytest.approx(origin + (span.start - began) * pixels_per_s, abs=PIXEL)
            assert box.width == pytest.approx(span.seconds * pixels_per_s, abs=PIXEL)
            assert str(span.note.micro_batch or "") in box.text
    assert drawn > 40
    assert len({seen.elements[f"box-{rank}-0"].y for rank in timelines}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("width", [1120, 500])
def test_labels_are_legible(browser: None, run_dir: Path, tmp_path: Path, width: int) -> None:
    """With scripts and without; a narrow window has figures of its own, and scrolls wide tables, not the page."""
    page, narrow = run_dir / "report.html", width < 640
    figures = {f"narrow-{name}" for name in FIGURES} if narrow else FIGURES
    seen = look_at(page, (width, SIZE[1]))
    assert seen.width <= width and all(narrow and 'class="wide"' in part[:20] for part in seen.cut)
    check_labels(seen, figures, 11)
    assert all(seen.elements[chart].height > 150 for chart in CHARTS)
    plain = look_at(without_scripts(page, tmp_path / "plain.html"), (width, SIZE[1]))
    assert plain.width <= width and all(narrow and 'class="wide"' in part[:20] for part in plain.cut)
    check_labels(plain, figures | {f"{chart}-drawing" for chart in CHARTS}, 11)
    assert plain.scripts == 0


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_curves_are_painted_and_the_console_is_quiet(seen: Seen, run_dir: Path, tmp_path: Path, dark: bool) -> None:
    """uPlot has painted lines, in the colours of the scheme; nothing was refused by the page's own policy."""
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    assert photograph(run_dir / "report.html", picture, SIZE, dark=dark) == []
    pixels = imread(picture)[:, :, :3]
    assert pixels[2, 2].mean() < 0.2 if dark else pixels[2, 2].mean() > 0.95
    for chart in CHARTS:
        box = seen.elements[chart]
        inside = pixels[int(box.y) : int(box.y) + 216, int(box.x) + 60 : int(box.right) - 10]
        colours = inside.max(axis=2) - inside.min(axis=2)
        assert 0.002 < (colours > 0.25).mean() < 0.5, chart


@pytest.mark.slow
def test_what_strangers_wrote_is_text(browser: None, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "\N{FRACTION SLASH}")
    write_run(folder, text=HOSTILE + "\x1b[31m\u202e\x00")
    write_run_page(folder, tmp_path / "hostile.html")
    seen = look_at(tmp_path / "hostile.html", SIZE)
    assert seen.scripts == 2 and seen.elements["tiles"].text.startswith("ended")
    assert seen.words.count("<b>bold</b>") > 10
    assert photograph(tmp_path / "hostile.html", tmp_path / "hostile.png", SIZE) == []
    assert not {"\x1b", "\u202e", "\x00"} & set((tmp_path / "hostile.html").read_text(encoding="utf-8"))


def test_a_long_run_on_a_thousand_ranks_fits(tmp_path: Path) -> None:
    """5,000 steps fill all that is thinned as any number of them does; noise is what compresses worst."""
    folder = tmp_path / "large"
    write_run(folder, steps=5_000, stages=64, replicas=4, tensors=4)
    with (folder / "events.jsonl").open("a") as file:
        for step in range(5, 5_000, 5):
            file.write(json.dumps({"time": 1.7e9, "event": "saved", "step": step, "where": "x" * 1000}) + "\n")
    page = folder / "report.html"
    write_run_page(folder, page)
    source = page.read_text(encoding="utf-8")
    assert 150_000 < page.stat().st_size <= LARGEST_PAGE
    assert "Of 1,024 ranks one of each stage is drawn" in source
    assert len(set(re.findall(r'id="box-(\d+)-', source))) == 64
    assert "Of 1,024 ranks 32 are drawn, each the fullest of its stage" in source
    assert "Of 64 stages 11 are drawn, at even distances" in source
    assert not any(word in source for word in ("<link", "<img", " src=", " href=", "url(", "@import"))


def test_strips_of_many_collectives_stay_few_and_where_they_are() -> None:
    """80 layers of 32 micro-batches have 20,000 collectives: drawn one by one they would be megabytes."""
    pieces = [(float(place), place + 0.4) for place in range(500)] + [(900.0, 910.0)]
    found = joined(pieces, 20)
    assert len(found) <= 20 and found[0][0] == 0.0 and found[-1] == (900.0, 910.0)
    assert joined(pieces, 1000) == pieces


def remove(*names: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def never_stepped(folder: Path) -> None:
    for name in ("metrics.jsonl", "steps.jsonl"):
        (folder / name).write_bytes(b"")


def halved(folder: Path) -> None:
    for name in ("metrics.jsonl", "steps.jsonl", "events.jsonl", "receipt.json", "config.yaml"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])


def of_an_older_version(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: line[key] for key in ("step", "time", "loss", "step_time_s")} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    (folder / "steps.jsonl").unlink()


def absurd(folder: Path) -> None:
    """Types and sizes that no run writes, at every place that a figure reads."""
    wrong = ["<b>", None, -1, 1e308, [], {}, [[]], {"stage": "x"}, True]
    stages = [{"stage": one, "mean_s": {"forward": one}, "communication": [one, {"calls": one}]} for one in wrong]
    (folder / "steps.jsonl").write_text(json.dumps({"step": 1, "stages": [*wrong, *stages]}) + "\n")
    receipt = json.loads((folder / "receipt.json").read_text())
    for place, name in enumerate(receipt):
        if name != "layout":
            receipt[name] = wrong[place % len(wrong)]
    receipt["layout"] = {"tensor_parallel_size": 10**9, "pipeline_parallel_size": "2", "data_parallel_size": None}
    receipt["goodput"] = {"goodput": "x", "seconds": {"productive": -5, "startup": "x", "lost": 1e300}}
    receipt["measured"] = {"ranks": wrong, "step_time_s": "x"}
    receipt["prediction"] = {"step_time_s": 1e17, "parts_s": wrong, "memory": wrong}
    (folder / "receipt.json").write_text(json.dumps(receipt))
    events = [{"event": "saved", "step": one, "time": one} for one in wrong] + [{"event": "slow_rank", "rank": []}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": 2, "loss": one, "parts_s": {"forward": one}, "time": one}) + "\n" for one in wrong)
    )


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (never_stepped, "No step is on record"),
        (halved, "Not on this page: "),
        (remove("receipt.json"), "receipt.json is missing or cannot be read."),
        (remove("config.yaml"), "config.yaml is missing or cannot be read."),
        (remove("metrics.jsonl", "steps.jsonl", "receipt.json", "config.yaml"), "No step is on record"),
        (of_an_older_version, "This run recorded no parts of its steps."),
        (absurd, "receipt.json does not say how the model was cut."),
    ],
)
def test_a_damaged_run_has_a_page_that_says_what_it_lacks(
    tmp_path: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    folder = tmp_path / "run"
    write_run(folder)
    spoil(folder)
    write_run_page(folder, folder / "report.html")
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert sentence in re.sub(r"</?code>", "", source)
    assert source.count("<section") == 13 and "NaN" not in source.partition("<script")[0]


def test_secrets_are_hidden(tmp_path: Path) -> None:
    """Names and texts: of settings as the rules for variables have it, of a command line too."""
    write_run(tmp_path / "run")
    config = config_of(tmp_path / "run", data={"path": "s3://AKIAIOSFODNN7EXAMPLE@bucket"})
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    write_run_page(tmp_path / "run", tmp_path / "page.html")
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "AKIAIOSFODNN7EXAMPLE" not in source and "hidden-value" not in source
    shown = hide_arguments(
        ["train", "a.yaml", "--api-key=abc", "--hub-token", "abc", "monitor.password=abc", "steps=3"]
    )
    assert shown == ["train", "a.yaml", "--api-key=***", "--hub-token", "***", "monitor.password=***", "steps=3"]


def test_settings_are_those_that_differ_from_what_they_were_without_being_set(tmp_path: Path) -> None:
    """`num_key_value_heads` follows another option where it is not set: 2 is told with the default of this model."""
    write_run(tmp_path / "run")
    history = RunHistory.read(tmp_path / "run")
    section = settings_section(PageData.of(history, read_status(tmp_path / "run")))
    rows = {
        cells[0]: cells[1:]
        for row in section.figure[0].iter("tr")
        if len(cells := [cell.text or "" for cell in row.iter("td")]) == 3
    }
    assert rows["model.num_key_value_heads"] == ["2", "4"]
    assert rows["model.hidden_size"] == ["32", ""]
    assert rows["precision.dtype"][0] == "fp32"
    assert not {"model.attention_bias", "monitor.plot", "seed"} & set(rows)


def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "run" / "config.yaml")
    mistakes = {
        (str(tmp_path / "none"),): "does not exist",
        (str(tmp_path / "run" / "timeline"),): "is a part of the run",
        (str(tmp_path / "empty"),): "is no folder of a run",
        (str(tmp_path / "run"), "--step", "11"): "the nearest is 10",
        (str(tmp_path / "run"), "-o", str(tmp_path)): "is a folder: name a file",
        (str(tmp_path / "run"), "-o", str(tmp_path / "mine.html")): "is no page that megalite has written",
        (str(tmp_path / "run"), "-o", str(tmp_path / "linked")): "is no page that megalite has written",
    }
    (tmp_path / "mine.html").write_text("<p>by hand</p>")
    for arguments, sentence in mistakes.items():
        monkeypatch.setattr("sys.argv", ["megalite", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err.strip()
        assert ended.value.code == 2 and sentence in said and "\n" not in said, (arguments, said)
    assert not (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "mine.html").read_text() == "<p>by hand</p>"
    monkeypatch.setattr("sys.argv", ["megalite", "report", str(tmp_path / "run"), "-o", str(tmp_path / "own.html")])
    for _ in range(2):  # a page of ours is replaced
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None), capsys.readouterr().err


def pictures_of(run_dir: Path, *, plot: bool = False) -> RunPictures:
    return RunPictures(cast(Any, SimpleNamespace(run_dir=run_dir, monitor=SimpleNamespace(plot=plot, report=True))))


def test_a_page_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has ended by then, and its ranks and supervisor wait for rank 0."""
    started = tmp_path / "started"
    script = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(run_pictures, "python_command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(run_pictures, "AT_MOST_S", 3.0)
    process = pictures_of(tmp_path)
    process.on_end("ended")
    with pytest.raises(TimeoutError, match=re.escape(f"`megalite report {tmp_path}` writes the page")):
        process.close()
    assert not started.exists() or not psutil.pid_exists(int(started.read_text() or 0)), "nothing of it is left"


def test_the_end_of_a_run_writes_its_page_or_says_in_a_sentence_why_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    process, page = pictures_of(tmp_path / "run", plot=True), tmp_path / "run" / "report.html"
    process.close()
    assert (page.parent / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not page.exists(), "after a crash its state would be that of a run that goes on"
    process.on_end("ended")
    process.close()
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert f"rank 0] megalite: wrote {page}\n" in capfd.readouterr().out
    page.unlink()
    page.symlink_to(tmp_path / "victim")
    process.close()
    said = capfd.readouterr().err
    assert re.search(r"warning: report\.html is not written.*report\.html is a symbolic link", said), said
    assert "Traceback" not in said and not (tmp_path / "victim").exists()


@pytest.mark.slow
def test_one_cursor_reads_all_curves_and_one_zoom_moves_them(browser: None, run_dir: Path) -> None:
    """A drag over one chart shows the same steps in all of them; a double click shows all steps again.

    Before there is a pointer, as on a phone, legends show the last values.
    """
    with open_page((run_dir / "report.html").resolve().as_uri()) as page:
        steps = "[...document.querySelectorAll('.live .u-series:first-child .u-value')].map(one => one.textContent)"
        losses = "[...document.querySelectorAll('#chart-loss .u-value')].map(one => one.textContent)"
        last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        assert set(page.evaluate(steps)) == {str(last["step"])}
        assert float(page.evaluate(losses)[1]) == pytest.approx(last["loss"], abs=1e-4)
        for axis, shown_last in (("tokens", f"{last['tokens_seen']:,}"), ("step", str(last["step"]))):
            page.evaluate(
                f"[...document.querySelectorAll('.axes button')].find(e => e.textContent == 'by {axis}').click()"
            )
            assert set(page.evaluate(steps)) == {shown_last}
        page.drag("#chart-loss .u-over", 0.25, 0.75)
        shown = page.evaluate(steps)
        assert len(shown) == len(CHARTS) and len(set(shown)) == 1 and int(shown[0]) > 20
        values = page.evaluate(losses)
        record = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[int(shown[0]) - 1])
        assert float(values[1]) == pytest.approx(record["loss"], abs=1e-4)
        page.drag("#chart-learning-rate .u-over", 0.0, 0.0)  # the left edge of what is shown now
        edges = page.evaluate(steps)
        assert len(set(edges)) == 1 and 8 <= int(edges[0]) <= 13
        twice = "new MouseEvent('dblclick', {bubbles: true})"
        page.evaluate(f"document.querySelector('#chart-goodput .u-over').dispatchEvent({twice})")
        page.drag("#chart-loss .u-over", 0.0, 0.0)
        assert set(page.evaluate(steps)) == {"1"}
        assert page.console == []


def test_the_index_of_a_folder_links_the_reports_and_draws_the_losses_of_its_runs(tmp_path: Path) -> None:
    """Names are anybody's: they are text in the table, and an address that a browser takes back to the same folder."""
    names = ["plain", "group/a 100% <b>one</b>#2"]
    for name in names:
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / names[1] / "report.html").write_text("that one")
    done = command_line("report", str(tmp_path / "runs"))
    assert done.returncode == 0 and "index.html" in done.stdout
    source = (tmp_path / "runs" / "index.html").read_text(encoding="utf-8")
    (address,) = re.findall(r'<a href="([^"]*)"', source)
    assert (tmp_path / "runs" / unquote(address)).read_text() == "that one"
    assert "<b>one" not in source and source.count("<td>40/40</td>") == 2
    losses = json.loads(re.findall(r'id="curves-data">(.*?)</script>', source)[0])[0]["charts"][0]["lines"]
    recorded = [json.loads(line)["loss"] for line in (tmp_path / "runs/plain/metrics.jsonl").read_text().splitlines()]
    assert {line["label"] for line in losses} == set(names)
    assert next(line for line in losses if line["label"] == "plain")["mean"] == pytest.approx(recorded, rel=1e-4)
    wrong = command_line("report", str(tmp_path / "runs"), "--step", "10")
    assert wrong.returncode == USER_ERROR_CODE and "holds 2 runs: give its folder" in wrong.stderr
