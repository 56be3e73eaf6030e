"""A page as headless Chromium shows it, without a network: where elements are, what its console says, how it looks.

In: an HTML file. Out: `Seen`, or a PNG; `why_no_browser`, one sentence or None; as a program, Debian's package.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.debian import install_packages, missing_programs

PROGRAM = "chromium"
PACKAGES = ("chromium", "fonts-dejavu-core")  # without any font there is no text
CHROMIUM_S = 90  # 2 where the machine is free
SIZE = (1120, 3200)
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--proxy-server=127.0.0.1:9",  # there is no network
    "--enable-logging=stderr",
)
CONSOLE = re.compile(r":CONSOLE[:(]\S*\] (.*)")
# every element with an id and every text in a drawing that is shown, with its place on the page
PROBE = """
const place = node => {
  const box = node.getBoundingClientRect();
  return {x: box.x, y: box.y + scrollY, width: box.width, height: box.height};
};
const elements = [...document.querySelectorAll('[id]')].map(node => ({
  id: node.id, tag: node.tagName, text: node.textContent, fill: getComputedStyle(node).fill, ...place(node)}));
const texts = [...document.querySelectorAll('svg text')].filter(node => node.getClientRects().length).map(node => ({
  text: node.textContent, drawing: node.ownerSVGElement.id, ...place(node)}));
const cut = [...document.querySelectorAll('*')].filter(node =>
  node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflowX === 'auto').map(node => node.outerHTML);
const seen = {elements, texts, cut, width: document.documentElement.scrollWidth,
  height: document.querySelector('main').getBoundingClientRect().bottom, words: document.body.innerText,
  scripts: document.querySelectorAll('script').length};
const out = document.createElement('pre');
out.id = 'probe';
out.textContent = JSON.stringify(seen);
document.body.append(out);
"""


@dataclass(frozen=True)
class Box:
    """Where something is, in pixels of the page; y grows downwards."""

    x: float
    y: float
    width: float
    height: float
    text: str  # that of a title among it
    fill: str = ""
    drawing: str = ""

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    def overlaps(self, other: Box, slack: float = 1.0) -> bool:
        return (
            self.x < other.right - slack
            and other.x < self.right - slack
            and self.y < other.bottom - slack
            and other.y < self.bottom - slack
        )


@dataclass(frozen=True)
class Seen:
    """A page as laid out."""

    elements: dict[str, Box]  # by id, in the order of the page
    texts: list[Box]  # of drawings
    cut: list[str]  # parts that must be scrolled sideways
    width: float  # that the page wants
    height: float
    words: str
    scripts: int


def why_no_browser() -> str | None:
    """Why pages cannot be tried here; None where they can."""
    if not missing_programs([PROGRAM]):
        return None
    return f"NO BROWSER HERE: {PROGRAM} not installed. `make test-packages` as root on Debian installs it"


def look_at(page: Path, size: tuple[int, int] = SIZE) -> Seen:
    """Lays out a copy of `page` that says where everything is: a script, which the page itself forbids."""
    source = page.read_text(encoding="utf-8")
    open_, forbids = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    assert forbids == 1, "the page has no policy of its own"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.html"
        copy.write_text(open_.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
        dom = _chromium(copy, size, "--dump-dom").stdout
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found, f"no probe in {dom[:500]}"
    seen = json.loads(html.unescape(found[1]))
    return Seen(
        elements={one["id"]: _box(one) for one in seen["elements"]},
        texts=[_box(one) for one in seen["texts"]],
        cut=seen["cut"],
        width=seen["width"],
        height=seen["height"],
        words=seen["words"],
        scripts=seen["scripts"] - 1,
    )


def photograph(page: Path, picture: Path, size: tuple[int, int] = SIZE, *, dark: bool = False) -> list[str]:
    """Writes a PNG of `page` as it is; what its console said."""
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = _chromium(page, size, f"--screenshot={picture}", *flags)
    assert picture.exists(), done.stderr[-2000:]
    return CONSOLE.findall(done.stderr)


def _box(one: dict[str, str | float]) -> Box:
    return Box(**{key: value for key, value in one.items() if key in Box.__dataclass_fields__})  # type: ignore[arg-type]


def _chromium(page: Path, size: tuple[int, int], *flags: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [
                PROGRAM,
                *FLAGS,
                f"--user-data-dir={profile}",
                f"--window-size={size[0]},{size[1]}",
                *flags,
                page.resolve().as_uri(),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHROMIUM_S,
            check=True,
        )


if __name__ == "__main__":
    if missing_programs([PROGRAM]) and (said := install_packages(PACKAGES)):
        print(f"no browser is installed: {said}: tests that need it are skipped", file=sys.stderr)
