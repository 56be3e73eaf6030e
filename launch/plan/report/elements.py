"""HTML and SVG as trees of the standard library, which escapes every text and attribute that it writes."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

Child = Element | str | None


def element(tag: str, *children: Child, **attributes: str | float | None) -> Element:
    """`element("p", "up to ", element("b", "5"))`. `class_` is `class`, `stroke_width` is `stroke-width`; None is left
    out."""
    named = {
        key.rstrip("_").replace("_", "-"): written(value) for key, value in attributes.items() if value is not None
    }
    node = Element(tag, named)
    return extend(node, *children)


def extend(node: Element, *children: Child) -> Element:
    """With `children` at its end."""
    for child in children:
        if isinstance(child, Element):
            node.append(child)
        elif child is not None and len(node):
            node[-1].tail = (node[-1].tail or "") + child
        elif child is not None:
            node.text = (node.text or "") + child
    return node


def written(value: str | float) -> str:
    """A coordinate with at most two decimals; text as it is."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def slug(name: str) -> str:
    """`pipeline bubble` as part of an id: `pipeline-bubble`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def titled(node: Element, title: str) -> Element:
    """With a text that browsers show beside a pointer on it."""
    node.insert(0, element("title", title))
    return node


def drawing(id_: str, label: str, width: float, height: float) -> Element:
    """An empty SVG image; `label` is what a screen reader says of it."""
    return element(
        "svg",
        id=id_,
        role="img",
        aria_label=label,
        viewBox=f"0 0 {written(width)} {written(height)}",
        style=f"max-width:{written(width)}px;min-width:{written(min(width, 640))}px",
    )


def bar(x: float, y: float, width: float, height: float, title: str, **attributes: str | float | None) -> Element:
    """A rectangle that says its exact number."""
    return titled(element("rect", x=x, y=y, width=width, height=height, **attributes), title)


def label(x: float, y: float, *words: Child, **attributes: str | float | None) -> Element:
    """Text whose baseline is at `y`."""
    return element("text", *words, x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, class_: str, **attributes: str | float | None) -> Element:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, **attributes)
