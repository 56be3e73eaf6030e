"""The page of `megalite watch`: it follows a run that goes on, is rolled back or is removed; no stranger scripts it."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from launch.inspection.history import RunHistory
from launch.inspection.watching import live_page
from launch.inspection.watching.live_page import LivePage
from launch.inspection.watching.live_run import LiveRun
from launch.inspection.watching.server import BadQuery, RunServer
from megalite.checkpoint.durable_files import write_durably
from tests.helpers.browser import why_no_browser
from tests.helpers.devtools import open_page
from tests.unit.launch.inspection.conftest import MakeRun

needs_browser = pytest.mark.skipif(why_no_browser() is not None, reason=why_no_browser() or "")
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "LOOK_S", 0.0)
    monkeypatch.setattr(live_page, "SHARE", 1e9)


def record(step: int, **values: Any) -> str:
    return json.dumps({"step": step, "time": time.time(), "loss": 3.0, "step_time_s": 0.5, **values}) + "\n"


def append(folder: Path, *steps: int, **values: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(record(step, **values) for step in steps)


def roll_back(folder: Path, step: int) -> None:
    """As a guard or a resumed session does it."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    write_durably(folder / "metrics.jsonl", "".join(lines[:step]).encode())


def news(page: LivePage, place: str = "0") -> dict[str, Any]:
    _, body, headers = page.news({"from": place})
    return json.loads(gzip.decompress(body) if "Content-Encoding" in headers else body)


def test_a_history_that_grows_is_that_of_the_whole_file(make_run: MakeRun) -> None:
    folder = make_run(steps=30)
    run = LiveRun(folder)
    for change in (
        lambda: None,
        lambda: append(folder, 31, 32),
        lambda: append(folder, 33, wall_s=0.5, parts_s={"forward": 0.2, "backward": 0.3}),
        lambda: roll_back(folder, 20),
        lambda: append(folder, 21, loss=9.0),
        lambda: append(folder, *range(22, 60)),
        lambda: (roll_back(folder, 10), append(folder, *range(11, 90), loss=7.0)),
    ):
        change()
        grown, whole = run.look(), RunHistory.read(folder)
        for name in {*grown.columns, *whole.columns}:
            assert grown.column(name).tolist() == pytest.approx(whole.column(name).tolist(), nan_ok=True), name
    assert run.offset == (folder / "metrics.jsonl").stat().st_size


def test_news_come_once(make_run: MakeRun) -> None:
    folder = make_run(steps=30, ending="ended")
    page = LivePage(folder)
    first = news(page)
    assert "<main>" in first["page"] and "curves-data" in first["page"] and "<style>" not in first["page"]
    assert news(page, first["next"]) == {"next": first["next"]}, "nothing has happened"
    append(folder, 31)
    second = news(page, first["next"])
    assert second["page"] != first["page"] and second["next"] != first["next"]
    assert news(page, "0")["page"] == second["page"], "for a browser that comes later"
    for place in ("-1", "31", "zero", "1-2"):
        with pytest.raises(BadQuery):
            news(page, place)


def test_a_run_without_steps_has_a_page(make_run: MakeRun) -> None:
    folder = make_run(saved=None)
    (folder / "metrics.jsonl").unlink()
    page = LivePage(folder)
    assert "<main>" in news(page)["page"]
    append(folder, 1)
    assert "<polyline" in news(page)["page"] or "<circle" in news(page)["page"]


def test_a_folder_that_is_removed_is_told(make_run: MakeRun) -> None:
    folder = make_run()
    page = LivePage(folder)
    news(page)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match="its folder is gone"):
        news(page)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the page of a run."""
    with RunServer("127.0.0.1", 0, LivePage(folder).routes) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/?token={server.token}"
        server.shutdown()
        thread.join()


@needs_browser
def test_new_steps_come_to_an_open_page(make_run: MakeRun) -> None:
    """In a browser that holds to the page's policy: a script that it refuses, or a poll that it forbids, shows here."""
    folder = make_run(steps=30, name=HOSTILE.replace("/", "_"))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": HOSTILE, "step": 30, "reason": HOSTILE}) + "\n")
    last_x = "JSON.parse(document.getElementById('curves-data').textContent)[0].x.at(-1)"
    with served(folder) as address, open_page(address) as page:
        page.evaluate("document.mark = 'never loaded again'")
        assert page.evaluate(last_x) == 30
        page.wait_for("document.getElementById('live').textContent.startsWith('live')")
        tiles = "document.getElementById('tiles').textContent"
        page.drag(".u-over", 0.4, 0.8)
        append(folder, *range(31, 42))
        page.wait_for(f"{tiles}.includes('41')")
        page.drag(".u-over", 0.001, 0.001)
        step = int(page.evaluate("document.querySelector('.u-legend .u-value').textContent"))
        assert 10 <= step <= 16, "who looks closer at steps 12 to 24 still does"
        drawn = "[...document.querySelectorAll('.uplot')].length"
        assert page.evaluate(drawn) >= 2, "curves are drawn, and have not been lost to news"
        roll_back(folder, 25)
        page.wait_for(f"{tiles}.includes('25') && !{tiles}.includes('41')")
        assert page.evaluate("document.mark") == "never loaded again"
        assert "owned" not in page.evaluate("document.title").replace(HOSTILE.replace("/", "_"), "")
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.console == []
        shutil.rmtree(folder)
        page.wait_for("document.getElementById('live').textContent.includes('its folder is gone')")
        assert page.evaluate(drawn) >= 2, "what was read last stays"
