"""The wall time of the run by what it went into, as one bar."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from launch.inspection.page.page_data import PageData, not_negative
from launch.pages.sections import PageSection, keys, number_table
from launch.pages.svg import AxisScale, at_both_widths, bar, drawing
from megalite.monitor.goodput import CATEGORIES
from megalite.units import duration, percent, plural

HEIGHT = 34.0
COLOURS = dict(zip(CATEGORIES, (2, 6, 4, 5, 8, 3, 1, 9, 10, 7), strict=True))


def goodput_section(found: PageData) -> PageSection:
    """Draws the account of receipt.json."""
    known = not_negative(found.receipt.goodput.seconds)
    spent = {name: known[name] for name in CATEGORIES if known.get(name, 0.0) > 0}
    wall = sum(spent.values())
    if not wall:
        return PageSection("goodput", "Goodput", "The account of the run's time is written at its end, and is missing.")
    figure = [
        *at_both_widths(lambda width: _bar(spent, wall, width)),
        keys([(f"fill-{COLOURS[name]}", f"{CATEGORIES[name]} {percent(spent[name] / wall)}") for name in spent]),
    ]
    sessions, lost = found.receipt.goodput.sessions, found.receipt.goodput.lost_steps
    caption = f"{duration(wall)} of wall time"
    if sessions is not None and lost is not None:
        caption += f" in {plural(sessions, 'session')}, {plural(lost, 'step')} lost"
    rows = [[CATEGORIES[name], duration(value), percent(value / wall)] for name, value in spent.items()]
    table = number_table(["what", "time", "share"], rows, words=[0])
    return PageSection("goodput", "Goodput", f"{caption}.", figure, table)


def _bar(spent: Mapping[str, float], wall: float, width: float) -> Element:
    scale, before, drawn = AxisScale(0.0, wall, 0.0, width), 0.0, []
    for name, value in spent.items():
        x, end = scale(before), scale(before + value)
        title = f"{CATEGORIES[name]}: {duration(value)}, {percent(value / wall)}"
        drawn.append(bar(x, 2, end - x, HEIGHT - 4, title, id=f"goodput-{name}", class_=f"fill-{COLOURS[name]}"))
        before += value
    return drawing("goodput-drawing", "What the wall time of the run went into", width, HEIGHT, drawn)
