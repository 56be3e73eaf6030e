"""HTML and SVG as trees of the standard library, which escapes every text and attribute that it writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

Child = Element | str | None | Iterable["Child"]


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


def coordinate(value: str | float) -> str:
    """Formats a number with at most two decimals; text is returned unchanged."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def slug(name: str) -> str:
    """A name as part of an id: `pipeline bubble` becomes `pipeline-bubble`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def drawing(id_: str, description: str, width: float, height: float, *children: Child) -> Element:
    """An SVG image; screen readers read `description`."""
    size = f"max-width:{coordinate(width)}px;min-width:{coordinate(min(width, 640))}px"
    box = f"0 0 {coordinate(width)} {coordinate(height)}"
    return element("svg", *children, id=id_, role="img", aria_label=description, viewBox=box, style=size)


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
