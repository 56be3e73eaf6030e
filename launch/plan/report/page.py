"""The page: what was planned, figures with their sentences, and what was assumed. No script, nothing from a network.

Its own Content-Security-Policy forbids browsers to load anything, so that a slip shows as an error in their console.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from launch.plan.report.elements import element, extend
from launch.plan.report.facts import Facts, goodput_words
from launch.plan.report.goodput_figure import goodput_figure
from launch.plan.report.memory_figure import memory_figure, memory_words
from launch.plan.report.ranking_table import ranking_table, ranking_words
from launch.plan.report.timeline_figure import timeline_figure, timeline_words
from launch.plan.report.waterfall_figure import waterfall_figure, waterfall_words
from megalite.planner.explanation import explain
from megalite.planner.job import Job
from megalite.planner.shapes import parameters
from megalite.planner.units import count, duration, gib, percent, plural, seconds

STYLE = Path(__file__).with_name("style.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(facts: Facts) -> str:
    """All of it, as one HTML document."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", facts.title),
        element("style", STYLE.read_text(encoding="utf-8")),
    )
    main = extend(element("main"), *_top(facts), *_sections(facts))
    html = element("html", head, element("body", main), lang="en")
    return f"<!DOCTYPE html>\n{tostring(html, encoding='unicode', method='html')}\n"


def _top(facts: Facts) -> list[Element]:
    """The answer: the layout to take and its main numbers."""
    winner, time = facts.winner, facts.winner.time
    job, layout = winner.job, winner.job.layout
    fullest = winner.fullest.total
    limit = facts.cluster.memory_bytes
    tiles = [
        (seconds(time.seconds), "per optimizer step"),
        (f"{count(winner.tokens_per_s)}", "tokens per second"),
        (percent(time.model_flops_utilization), "model FLOPs utilization"),
        (gib(fullest), f"fullest rank, {percent(fullest / limit)} of {gib(limit)}"),
        (percent(facts.by_interval.marked.goodput), "goodput: wall time that counts"),
        (duration(facts.by_interval.marked.x), "between checkpoints"),
    ]
    drawn = [
        element("h1", facts.title),
        element("p", _job_words(job), " ", _cluster_words(facts), class_="subtitle"),
        element("p", "Take ", element("b", str(layout), id="winner"), f": {plural(layout.world_size, 'rank')}."),
        element("div", *(element("div", element("b", n), element("span", what), class_="tile") for n, what in tiles)),
    ]
    drawn[-1].set("class", "tiles")
    why = (element("li", words) for words in explain(facts.result))
    return [
        *drawn,
        element("ul", *why, class_="why"),
        element("p", "Predicted, not measured; the assumptions stand at the end.", class_="note"),
    ]


def _job_words(job: Job) -> str:
    model, size = job.model, parameters(job.model)
    words = f"{size / 1e9:.3g} billion" if size >= 1e9 else f"{size / 1e6:.3g} million"
    return (
        f"{model.model_type} of {words} parameters ({plural(model.num_hidden_layers, 'block')} of "
        f"width {model.hidden_size:,}), {plural(job.global_batch_size, 'sequence')} of "
        f"{plural(job.sequence_length, 'token')} per step, {job.dtype}."
    )


def _cluster_words(facts: Facts) -> str:
    cluster = facts.cluster
    return (
        f"{plural(cluster.nodes, 'node')} of {cluster.accelerators_per_node} {cluster.accelerator_name}, "
        f"{cluster.intra_node.gb_per_s:.3g} GB/s inside a node, {plural(cluster.adapters_per_node, 'adapter')} of "
        f"{cluster.inter_node.gb_per_s:.3g} GB/s between nodes."
    )


def _sections(facts: Facts) -> list[Element]:
    winner, limit = facts.winner, facts.cluster.memory_bytes
    memory = memory_figure(winner.memory, limit)
    ranking = ranking_table(facts.result.candidates, limit)
    return [
        _section("Memory per pipeline stage", memory, memory_words(winner.memory, limit, winner.layout)),
        _section("Layouts that fit, ranked", ranking, ranking_words(facts.result)),
        _section("Where the step time goes", waterfall_figure(winner.time), waterfall_words(winner.time)),
        _section("Pipeline timeline", timeline_figure(facts.timeline), timeline_words(facts.timeline, winner.time)),
        _goodput(facts),
        _assumptions(facts),
    ]


def _section(title: str, drawn: Element, words: str) -> Element:
    return element("section", element("h2", title), element("figure", drawn, element("figcaption", words)))


def _goodput(facts: Facts) -> Element:
    interval = goodput_figure("goodput-interval", facts.by_interval, "Goodput against the checkpoint interval")
    size = goodput_figure("goodput-gpus", facts.by_size, "Goodput against the number of accelerators")
    panels = element(
        "div",
        element("div", element("h3", "Against the checkpoint interval"), interval),
        element("div", element("h3", "Against the size of the cluster"), size),
        class_="side-by-side",
    )
    caption = element("figcaption", goodput_words(facts.at_size, facts.assumed))
    return element("section", element("h2", "Goodput"), element("figure", panels, caption))


def _assumptions(facts: Facts) -> Element:
    head = element("tr", *(element("th", words, class_="words") for words in ("what", "value", "where it is from")))
    rows = [
        element(
            "tr", *(element("td", w, class_="words") for w in (assumption.what, assumption.value, assumption.source))
        )
        for assumption in facts.assumptions
    ]
    table = element("table", element("thead", head), element("tbody", *rows), id="assumptions")
    note = element(
        "p",
        "The formulas, their sources, and how far they are from published measurements: docs/planner.md. After a run "
        "of your own, ",
        element("code", "megalite plan calibrate"),
        " replaces the calibrated constant by one of your cluster.",
        class_="note",
    )
    return element("section", element("h2", "Assumptions"), element("div", table, class_="wide"), note)
