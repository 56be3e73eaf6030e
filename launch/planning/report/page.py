"""The HTML page of the report. It has no script and loads nothing: a Content-Security-Policy makes browsers report it
if it ever tries to."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from string import Template
from xml.etree.ElementTree import Element, tostring

from launch.planning.report.content import ReportContent
from launch.planning.report.goodput_figure import goodput_caption, goodput_figure, interval_curve, size_curve
from launch.planning.report.memory_figure import memory_caption, memory_figure
from launch.planning.report.ranking_table import ranking_caption, ranking_table
from launch.planning.report.svg import element
from launch.planning.report.timeline_figure import timeline_caption, timeline_figure
from launch.planning.report.waterfall_figure import waterfall_caption, waterfall_figure
from megalite.planner.cost.shapes import parameters
from megalite.planner.explanation import explain
from megalite.planner.units import count, duration, gib, percent, plural, seconds

FOLDER = Path(__file__).parent


def render_page(content: ReportContent) -> str:
    """Fills in page.html. Every text is escaped; figures and tables are elements."""
    winner, cluster, scale = content.winner, content.cluster, content.scale
    job, layout, time, limit = winner.job, winner.job.layout, winner.time, cluster.memory_bytes
    model, size = job.model, parameters(job.model)
    size_text = f"{size / 1e9:.3g} billion" if size >= 1e9 else f"{size / 1e6:.3g} million"
    tiles = {
        "per optimizer step": seconds(time.seconds),
        "tokens per second": count(winner.tokens_per_s),
        "model FLOPs utilization": percent(time.model_flops_utilization),
        f"fullest rank, {percent(winner.fullest.total / limit)} of {gib(limit)}": gib(winner.fullest.total),
        "goodput: wall time that counts": percent(scale.goodput),
        "between checkpoints": duration(scale.interval_s),
    }
    by_interval, by_size = interval_curve(content.assumed, scale), size_curve(content.assumed, scale.gpus)
    values: dict[str, str | Element | Sequence[Element]] = {
        "title": content.title,
        "job": f"{model.model_type} of {size_text} parameters ({plural(model.num_hidden_layers, 'block')} of width "
        f"{model.hidden_size:,}), {plural(job.global_batch_size, 'sequence')} of "
        f"{plural(job.sequence_length, 'token')} per step, {job.dtype}.",
        "cluster": f"{plural(cluster.nodes, 'node')} of {cluster.accelerators_per_node} {cluster.accelerator_name}, "
        f"{cluster.intra_node.gb_per_s:.3g} GB/s inside a node, {plural(cluster.adapters_per_node, 'adapter')} of "
        f"{cluster.inter_node.gb_per_s:.3g} GB/s between nodes.",
        "layout": str(layout),
        "ranks": plural(layout.world_size, "rank"),
        "tiles": [
            element("div", element("b", number), element("span", name), class_="tile") for name, number in tiles.items()
        ],
        "reasons": [element("li", sentence) for sentence in explain(content.result)],
        "memory": memory_figure(winner.memory, limit),
        "memory_caption": memory_caption(winner.memory, limit, winner.layout),
        "ranking": ranking_table(content.result.candidates, limit),
        "ranking_caption": ranking_caption(content.result),
        "waterfall": waterfall_figure(time),
        "waterfall_caption": waterfall_caption(time),
        "timeline": timeline_figure(content.timeline),
        "timeline_caption": timeline_caption(content.timeline, time),
        "goodput_by_interval": goodput_figure("goodput-interval", by_interval, "Goodput by checkpoint interval"),
        "goodput_by_size": goodput_figure("goodput-gpus", by_size, "Goodput by number of accelerators"),
        "goodput_caption": goodput_caption(scale, content.assumed),
        "assumptions": [
            element("tr", [element("td", cell, class_="words") for cell in (one.what, one.value, one.source)])
            for one in content.assumptions
        ],
    }
    style, page = ((FOLDER / name).read_text(encoding="utf-8") for name in ("style.css", "page.html"))
    return Template(page).substitute({name: _html(value) for name, value in values.items()}, style=style)


def _html(value: str | Element | Sequence[Element]) -> str:
    if isinstance(value, str):
        return html.escape(value)
    elements = [value] if isinstance(value, Element) else value
    return "\n".join(tostring(each, encoding="unicode", method="html") for each in elements)
