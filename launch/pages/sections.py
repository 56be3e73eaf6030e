"""Sections of a page about a run: a heading, a figure with its caption, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from launch.pages.svg import Child, element, with_code
from megalite.checkpoint.manifest import printable


@dataclass(frozen=True)
class PageSection:
    """A part of the page under a heading of its own; without a figure, `caption` says what is lacking."""

    id: str
    title: str
    caption: str
    figure: Sequence[Element] = ()
    table: Element | None = None  # the numbers of the figure, which the reader opens

    def elements(self) -> Element:
        """Returns it as an element of the page."""
        caption = element("figcaption", with_code(self.caption)) if self.caption else None
        lacking = element("p", with_code(self.caption), class_="note")
        body: Child = element("figure", list(self.figure), caption) if self.figure else lacking
        table = None
        if self.table is not None:
            inner = element("div", self.table, class_="wide")
            table = element("details", element("summary", "the numbers"), inner)
        return element("section", element("h2", self.title), body, table, id=self.id)


def number_table(header: Sequence[str], rows: Sequence[Sequence[str | Element]], words: Sequence[int] = ()) -> Element:
    """Builds a table; columns in `words` hold text, all others numbers."""
    kinds = ["words" if place in words else None for place in range(len(header))]
    head = element("tr", [element("th", one, class_=kind) for one, kind in zip(header, kinds, strict=True)])
    body = []
    for row in rows:
        shown = [printable(cell) if isinstance(cell, str) else cell for cell in row]
        body.append(element("tr", [element("td", cell, class_=kind) for cell, kind in zip(shown, kinds, strict=True)]))
    return element("table", element("thead", head), element("tbody", body))


def keys(names: Sequence[tuple[str, str]]) -> Element:
    """Builds the key of a figure from pairs of a class that colours and a name; names of one colour share an entry."""
    by_class: dict[str, list[str]] = {}
    for kind, name in names:
        by_class.setdefault(kind, []).append(name)
    names = [(kind, ", ".join(of_kind)) for kind, of_kind in by_class.items()]
    return element(
        "p", [element("span", element("i", "", class_=kind), name, class_="key") for kind, name in names], class_="keys"
    )
