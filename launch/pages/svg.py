"""HTML and SVG as trees of the standard library, which escapes every text and attribute that it writes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

Child = Element | str | None | Iterable["Child"]
WIDE, NARROW = 960.0, 360.0  # pixels that a figure has on a page, and on a phone
WIDE_CLASS = "wide-figure"


def element(tag: str, *children: Child, **attributes: str | float | None) -> Element:
    """Builds an element: `element("p", "up to ", element("b", "5"), class_="note")`.

    Children may be nested in lists; children and attributes that are None are left out. `class_` becomes `class`, and
    `stroke_width` becomes `stroke-width`.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    node = Element(tag, {key: coordinate(value) for key, value in given.items()})
    _append(node, children)
    return node


def _append(node: Element, child: Child) -> None:
    if isinstance(child, Element):
        node.append(child)
    elif isinstance(child, str):
        if len(node):
            node[-1].tail = (node[-1].tail or "") + child
        else:
            node.text = (node.text or "") + child
    elif child is not None:
        for each in child:
            _append(node, each)


def with_code(sentence: str) -> list[Child]:
    """Returns a sentence with what stands in backticks as code."""
    pieces = sentence.split("`")
    if len(pieces) % 2 == 0:
        return [sentence]
    return [element("code", piece) if place % 2 else piece for place, piece in enumerate(pieces)]


def coordinate(value: str | float) -> str:
    """Formats a number with at most two decimals; text is returned unchanged."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def slug(name: str) -> str:
    """A name as part of an id: `pipeline bubble` becomes `pipeline-bubble`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def drawing(id_: str, description: str, width: float, height: float, *children: Child) -> Element:
    """An SVG image; screen readers read `description`."""
    size = f"max-width:{coordinate(width)}px;min-width:{640 if width > 640 else 300}px"
    box = f"0 0 {coordinate(width)} {coordinate(height)}"
    return element("svg", *children, id=id_, role="img", aria_label=description, viewBox=box, style=size)


def at_both_widths(draw: Callable[[float], Element]) -> list[Element]:
    """Draws a figure for a page and again for a phone, with letters of the same size; style.css shows one of them.

    A phone has no pointer, for which boxes have titles.
    """
    narrow = draw(NARROW)
    for node in narrow.iter():
        node.attrib.pop("id", None)
        for title in node.findall("title"):
            node.remove(title)
    wide = draw(WIDE)
    narrow.set("id", f"narrow-{wide.get('id')}")
    return [element("div", wide, class_=WIDE_CLASS), element("div", narrow, class_="narrow-figure")]


def at_one_width(figure: Iterable[Element]) -> list[Element]:
    """Returns a figure of `at_both_widths` with the drawing of a page alone, which a phone scrolls."""
    kept = [one for one in figure if one.get("class") != "narrow-figure"]
    for one in kept:
        if one.get("class") == WIDE_CLASS:
            one.set("class", "wide")
    return kept


def bar(x: float, y: float, width: float, height: float, title: str, **attributes: str | float | None) -> Element:
    """A rectangle; browsers show `title` next to the pointer."""
    return element("rect", element("title", title), x=x, y=y, width=width, height=height, **attributes)


def label(x: float, y: float, text: str, class_: str, anchor: str | None = None) -> Element:
    """Text with its baseline at `y`; `anchor` is `middle` or `end` where the text does not start at `x`."""
    return element("text", text, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str, id_: str | None = None) -> Element:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, id=id_)


@dataclass(frozen=True)
class AxisScale:
    """Maps values to coordinates: `low` to `start` and `high` to `end`, which may be the smaller coordinate."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values between `low` and `high` in equal steps."""
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True)
class BarRows:
    """Places in a figure of bars, one row below the other: names left of the bars and values right of them.

    Where the figure is narrow, both stand above the bars, which have its whole width.
    """

    width: float  # of the figure, as the next three in pixels
    names: float  # what the names take
    values: float  # what the values take
    height: float  # of the bars of a row
    rows: int
    top: float = 10.0

    @property
    def left(self) -> float:
        return 16.0 if self.width < WIDE else self.names

    @property
    def right(self) -> float:
        return self.width - (16.0 if self.width < WIDE else self.values)

    @property
    def pitch(self) -> float:
        return self.height + (26.0 if self.width < WIDE else 6.0)

    @property
    def bottom(self) -> float:
        return self.top + self.pitch * self.rows

    def y(self, row: int) -> float:
        """Returns where the bars of a row begin."""
        return self.top + self.pitch * row + (20.0 if self.width < WIDE else 0.0)

    def words(self, row: int, name: str, *values: str, strong: bool = False) -> list[Element]:
        """Returns the name of a row and its values."""
        kind, y = " strong" if strong else "", self.y(row)
        if self.width < WIDE:
            value = label(self.right, y - 5, ", ".join(values), f"value{kind}", "end")
            return [label(self.left, y - 5, name, f"legend{kind}"), value]
        middle = y + self.height / 2 + 4
        places = [self.right + self.values * (place + 1) / len(values) for place in range(len(values))]
        drawn = [label(x, middle, text, f"value{kind}", "end") for x, text in zip(places, values, strict=True)]
        return [label(self.left - 12, middle, name, f"legend{kind}", "end"), *drawn]


def vertical_axis(scale: AxisScale, left: float, right: float, ticks: Mapping[float, str], title: str) -> list[Element]:
    """Grid lines from `left` to `right`, with their labels, and the title above."""
    drawn = [label(left - 44, min(scale.start, scale.end) - 14, title, "axis")]
    for tick, text in ticks.items():
        y = scale(tick)
        drawn += [line(left, y, right, y, "grid"), label(left - 8, y + 4, text, "tick", "end")]
    return drawn


def horizontal_axis(
    scale: AxisScale, top: float, bottom: float, ticks: Mapping[float, str], title: str
) -> list[Element]:
    """Grid lines from `top` to `bottom`, with their labels, and the title below."""
    drawn = [label((scale.start + scale.end) / 2, bottom + 38, title, "axis", "middle")]
    for tick, text in ticks.items():
        x = scale(tick)
        drawn += [line(x, top, x, bottom, "grid"), label(x, bottom + 18, text, "tick", "middle")]
    return drawn
