"""The page of a run that grows, as the server of `megalite watch` hands it out.

A browser gets the page once, and asks for news with the place up to which it knows the run: the answer holds what has
changed on the page, or nothing.
"""

from __future__ import annotations

import gzip
import re
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from launch.inspection.page.page_data import PageData
from launch.inspection.page.run_page import run_page
from launch.inspection.status import read_status
from launch.inspection.watching.live_run import LiveRun
from launch.inspection.watching.server import HTML, Answer, BadQuery, Query, Route, json_answer
from launch.inspection.watching.tail import Cursor

LOOK_S = 1.0  # between two looks at the run, whoever asks; browsers ask every two seconds
SHARE = 0.2  # of a core that looks may take: for long runs, whose pages take longer
POLICY = re.compile(r'http-equiv="Content-Security-Policy" content="([^"]*)"')
CHANGING = re.compile(r'<main>.*</main>\s*<script type="application/json" id="curves-data">.*?</script>', re.DOTALL)
SCRIPT = Path(__file__).with_name("live.js")


@dataclass(frozen=True)
class _Rendered:
    """The page at one moment, and the place of that moment: bytes of metrics.jsonl, digest of what the page shows."""

    html: str
    changing: str  # the part of it that browsers put in the place of the one before
    place: Cursor

    @classmethod
    def of(cls, html: str, offset: int) -> _Rendered:
        found = CHANGING.search(html)
        changing = found[0] if found else html
        return cls(html, changing, Cursor(max(1, offset), blake2b(changing.encode(), digest_size=8).hexdigest()))


class LivePage:
    """Renders the page of a run anew when it is asked for and the run has gone on. For any number of threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run = LiveRun(run_dir)
        self._lock = Lock()
        self._found: PageData | None = None
        self._rendered: _Rendered | None = None
        self._next_look = 0.0

    @property
    def routes(self) -> dict[str, Route]:
        return {"/": self.page, "/news": self.news}

    def page(self, query: Query) -> Answer:
        """Answers with the whole page. Raises OSError where the run cannot be read."""
        html = self._now().html
        policy = POLICY.search(html)
        assert policy is not None, "the page has a policy of its own"
        return HTML, html.encode(), {"Content-Security-Policy": f"{policy[1]}; frame-ancestors 'none'"}

    def news(self, query: Query) -> Answer:
        """Answers with what the page shows now, unless that is what the client has from the place `from`."""
        try:
            known = Cursor.parse(query.get("from", "0"))
        except ValueError as error:
            raise BadQuery(str(error)) from None
        now = self._now()
        values = {"next": str(now.place)} | ({"page": now.changing} if known != now.place else {})
        kind, body, headers = json_answer(values)
        if "page" not in values:
            return kind, body, headers
        return kind, gzip.compress(body, 1), {**headers, "Content-Encoding": "gzip"}

    def _now(self) -> _Rendered:
        with self._lock:
            if self._rendered is None or time.monotonic() >= self._next_look:
                began_s = time.thread_time()
                before, history = self._run.offset, self._run.look()
                status = read_status(self._run.run_dir)
                has_gone_on = self._run.offset >= before  # else its steps are done again, also one that was kept
                self._found = PageData.of(history, status, earlier=self._found if has_gone_on else None)
                html = run_page(self._found, tail=SCRIPT.read_text(encoding="utf-8"))
                self._rendered = _Rendered.of(html, self._run.offset)
                took_s = time.thread_time() - began_s
                self._next_look = time.monotonic() + max(LOOK_S, took_s / SHARE)
            return self._rendered
