"""The page itself: one file that loads nothing, whose only script is known to its policy by its hash."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from xml.etree.ElementTree import Element, tostring

from launch.errors import LaunchError
from launch.output import check_writable
from launch.pages.curves import Curves, curves_data
from launch.pages.sections import PageSection
from launch.pages.svg import element, with_code

FOLDER = Path(__file__).parent
GENERATOR, MOST_BEFORE_GENERATOR = b'<meta name="generator" content="megalite">', 1024  # bytes
STYLES = ("style.css", "uplot/uPlot.min.css", "page.css")
SCRIPTS = ("uplot/uPlot.iife.min.js", "charts.js")
# control characters, those that turn the direction of text, and halves of characters, which UTF-8 cannot hold
UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def render_page(
    title: str,
    subtitle: str,
    tiles: Mapping[str, str],
    sentences: Sequence[str],
    sections: Sequence[PageSection],
    curves: Sequence[Curves] = (),
    *,
    origin: str = "",
    tail: str = "",
) -> str:
    """Returns a page as HTML; every text is escaped.

    `tiles` are the numbers at its top by their names, `origin` says below it where it is from. `tail` is a script that
    runs after charts.js and may ask the server that the page came from for more; without one the page can ask nobody.
    """
    script = "\n".join([*(page_text(name) for name in SCRIPTS), tail])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    values = {
        "title": html.escape(title),
        "subtitle": html.escape(subtitle),
        "tiles": _html([tile(name, value) for name, value in tiles.items()]),
        "sentences": _html([element("li", with_code(sentence)) for sentence in sentences]),
        "sections": _html([section.elements() for section in sections]),
        "origin": html.escape(origin),
        "data": json.dumps([curves_data(one) for one in curves], separators=(",", ":")).replace("<", "\\u003c"),
    }
    shown = {name: UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value) for name, value in values.items()}
    return Template(page_text("page.html")).substitute(
        shown,
        policy=policy + ("; connect-src 'self'" if tail else ""),
        style="\n".join(map(page_text, STYLES)),
        script=script,
    )


def check_page_path(path: Path) -> None:
    """Raises LaunchError where a page cannot be written, or where there is something that is no page of ours."""
    check_writable(path)
    if os.path.lexists(path) and not _is_page(path):
        raise LaunchError(f"{path} is there already and is no page that megalite has written: give another -o")
    if path.suffix not in ("", ".html", ".htm"):
        raise LaunchError(f"{path}: a page is HTML: name it {path.with_suffix('.html')}")


def _is_page(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR in file.read(MOST_BEFORE_GENERATOR)


def tile(name: str, value: str) -> Element:
    """Returns a number at the top of a page, with its name below it."""
    return element("div", element("b", value), element("span", name), class_="tile")


def page_text(name: str) -> str:
    """Returns a style, script or page of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


def _html(elements: Sequence[Element]) -> str:
    return "\n".join(tostring(one, encoding="unicode", method="html") for one in elements)
