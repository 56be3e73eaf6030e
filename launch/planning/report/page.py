"""The report of `megalite plan --html`: one page that holds the whole result, to read offline, print and pass on.

It has no script and loads nothing: a Content-Security-Policy makes browsers report it
if it ever tries to."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from string import Template
from xml.etree.ElementTree import Element, tostring

from data_pipeline.storage.paths import decimal_size
from launch.output import write_file
from launch.pages.skeleton import page_text, tile
from launch.pages.svg import element, with_code
from launch.planning.report.goodput_figure import goodput_caption, goodput_figure, interval_curve, size_curve
from launch.planning.report.memory_figure import memory_caption, memory_figure
from launch.planning.report.ranking_table import ranking_caption, ranking_table
from launch.planning.report.timeline_figure import timeline_section
from launch.planning.report.waterfall_figure import waterfall_caption, waterfall_figure
from launch.planning.tables.forecast import forecast_lines, format_interval, money
from megalite.config import Config
from megalite.planner.cost.checkpoints import PER_NODE
from megalite.planner.cost.memory import CUDA
from megalite.planner.cost.stage_parameters import parameters
from megalite.planner.explanation import explain
from megalite.planner.failure_rates import PUBLISHED_BAND
from megalite.planner.forecast import RunForecast, forecast_of
from megalite.planner.hardware import Cluster, is_guess
from megalite.planner.search import LayoutCandidate, SearchResult
from megalite.units import about, count, duration, gib, percent, plural, seconds, short

FOLDER = Path(__file__).parent


def write_report(
    path: Path, result: SearchResult, cluster: Cluster, name: str, config: Config, price: float | None = None
) -> None:
    """Writes the report of a search that found a layout for the run of `config`; its figures show the best one.

    `name` is what the page calls the run, `price` that of an accelerator-hour, in any currency. Raises LaunchError
    where `path` cannot be written.
    """
    assert result.best is not None, "a report needs a layout that fits"
    forecast = forecast_of(config, result.best.job, result.best.time.seconds, cluster.accelerators_per_node)
    write_file(path, _render(result, result.best, cluster, name, forecast, config, price))


def _render(
    result: SearchResult,
    winner: LayoutCandidate,
    cluster: Cluster,
    name: str,
    forecast: RunForecast,
    config: Config,
    price: float | None,
) -> str:
    """Fills in page.html. Every text is escaped; figures and tables are elements."""
    assumed, scale = forecast.assumed, forecast.scale
    job, layout, time, limit = winner.job, winner.job.layout, winner.time, cluster.memory_bytes
    model, size, rough = job.model, parameters(job.model), is_guess(cluster.accelerator)
    size_text = f"{size / 1e9:.3g} billion" if size >= 1e9 else f"{size / 1e6:.3g} million"
    by_interval, by_size = interval_curve(assumed, scale), size_curve(assumed, scale.gpus)
    values: dict[str, str | Element | Sequence[Element]] = {
        "title": f"{name} on {cluster.nodes * cluster.accelerators_per_node:,} {cluster.accelerator_name}",
        "job": f"{model.model_type} of {size_text} parameters ({plural(model.num_hidden_layers, 'block')} of width "
        f"{model.hidden_size:,}), {plural(job.global_batch_size, 'sequence')} of "
        f"{plural(job.sequence_length, 'token')} per step, {job.dtype}.",
        "cluster": f"{plural(cluster.nodes, 'node')} of {cluster.accelerators_per_node} {cluster.accelerator_name}, "
        f"{cluster.intra_node.gb_per_s:.3g} GB/s inside a node, {plural(cluster.adapters_per_node, 'adapter')} of "
        f"{cluster.inter_node.gb_per_s:.3g} GB/s between nodes.",
        "layout": str(layout),
        "ranks": plural(layout.world_size, "rank"),
        "tiles": [tile(*one) for one in _tiles(winner, cluster, forecast, config, price).items()],
        "reasons": [
            element("li", with_code(sentence))
            for sentence in (*explain(result), *forecast_lines(forecast, config, price, rough=rough))
        ],
        "memory": memory_figure(winner.memory, limit),
        "memory_caption": memory_caption(winner.memory, limit, winner.layout),
        "ranking": ranking_table(result.candidates, limit),
        "ranking_caption": ranking_caption(result),
        "waterfall": waterfall_figure(time),
        "waterfall_caption": waterfall_caption(time, layout.tensor_parallel_size),
        "timeline": timeline_section(winner),
        "goodput_by_interval": goodput_figure("goodput-interval", by_interval, "Goodput by checkpoint interval"),
        "goodput_by_size": goodput_figure("goodput-gpus", by_size, "Goodput by number of accelerators"),
        "goodput_caption": goodput_caption(scale, assumed, format_interval(forecast, config)),
        "assumptions": [
            element("tr", [element("td", cell, class_="words") for cell in one])
            for one in assumptions_of(winner, cluster, forecast)
        ],
    }
    style, page = page_text("style.css"), (FOLDER / "page.html").read_text(encoding="utf-8")
    return Template(page).substitute({name: _html(value) for name, value in values.items()}, style=style)


def _tiles(
    winner: LayoutCandidate, cluster: Cluster, forecast: RunForecast, config: Config, price: float | None
) -> dict[str, str]:
    """The figures at the top of the page, by their names."""
    time, length, limit, is_rough = winner.time, forecast.length, cluster.memory_bytes, is_guess(cluster.accelerator)
    tiles = {
        f"expected for {plural(length.steps, 'step')}": about(length.wall_s) if is_rough else duration(length.wall_s)
    }
    if length.ends:
        tiles["accelerator-hours"] = count(length.accelerator_hours)
    if price is not None and length.ends:
        tiles[f"price, at {price:g} an accelerator-hour"] = money(length.price(price))
    tiles |= {
        "per optimizer step": about(time.seconds) if is_rough else seconds(time.seconds),
        "tokens per second": count(winner.tokens_per_s),
    }
    if time.model_flops_utilization is not None:
        tiles["model FLOPs utilization"] = percent(time.model_flops_utilization)
    return tiles | {
        f"fullest rank, {percent(winner.fullest.total / limit)} of {gib(limit)}": gib(winner.fullest.total),
        "goodput: wall time that counts": percent(forecast.scale.goodput),
        "between checkpoints": duration(forecast.scale.interval_s) if config.checkpoint.interval else "none",
    }


def _html(value: str | Element | Sequence[Element]) -> str:
    if isinstance(value, str):
        return html.escape(value)
    elements = [value] if isinstance(value, Element) else value
    return "\n".join(tostring(each, encoding="unicode", method="html") for each in elements)


def assumptions_of(
    winner: LayoutCandidate, cluster: Cluster, forecast: RunForecast
) -> tuple[tuple[str, str, str], ...]:
    """Lists the assumptions, the least certain ones first: what is assumed, its value and the source."""
    job, assumed, scale = winner.job, forecast.assumed, forecast.scale
    accelerator, (low, high) = cluster.accelerator, PUBLISHED_BAND
    storage = assumed.storage
    writers = "one writer a node" if storage.writers == PER_NODE else f"writers: {storage.writers}"
    limit = storage.storage_bytes_per_s
    at_most = "" if limit is None else f", {limit / 1e9:g} GB/s in total at most"
    parts = winner.fullest.parts
    allocator, context = parts.get("allocator", 0.0), parts.get("context", 0.0)
    allocator_share = allocator / (winner.fullest.total - allocator - context)
    peak = cluster.peak_flops(job.dtype) / 1e12
    return (
        (
            "calibrated constant: part of the peak that large matrix products reach",
            f"{accelerator.efficiency:.3g} of {peak:.4g} TFLOP/s in {job.dtype}",
            f"fitted on {accelerator.calibrated_on}" if accelerator.is_fitted else accelerator.calibrated_on,
        ),
        (
            f"{cluster.accelerator_name}: memory, and its bandwidth",
            f"{gib(cluster.memory_bytes)}, {accelerator.memory_gb_per_s:.4g} GB/s",
            accelerator.source or "unknown",
        ),
        (
            "memory besides tensors: unused blocks of the allocator, and the CUDA context",
            f"{percent(allocator_share)} of tensors + {gib(context)}",
            "a typical value, not fitted" if abs(allocator_share - CUDA.fragments) < 1e-6 else "docs/planner.md",
        ),
        (
            "link inside a node, each way",
            f"{cluster.intra_node.gb_per_s:.3g} GB/s",
            cluster.intra_node.source or "unknown",
        ),
        (
            "links between nodes, each way",
            f"{cluster.adapters_per_node} x {cluster.inter_node.gb_per_s:.3g} GB/s a node",
            cluster.inter_node.source or "unknown",
        ),
        (
            "failures per 1,000 node-days",
            f"{short(assumed.rate_per_1000_node_days)}; published: {low:g} to {high:g}",
            f"one failure every {duration(scale.mtbf_hours * 3600)} on {plural(scale.nodes, 'node')}, "
            f"{duration(scale.mtbf_hours_at_high_rate * 3600)} to {duration(scale.mtbf_hours_at_low_rate * 3600)} over "
            "the band",
        ),
        (
            "checkpoint",
            f"{decimal_size(int(assumed.checkpoint_bytes))}, written in {duration(scale.save_duration_s)}",
            f"{assumed.bytes_per_parameter:g} bytes a parameter; {writers} at {storage.writer_bytes_per_s / 1e9:g} "
            f"GB/s{at_most}; {'in the background' if storage.background else 'training waits'}",
        ),
        (
            "after a failure",
            f"{duration(assumed.down_s)} without training",
            f"{duration(assumed.detection_s)} until it is detected, {duration(assumed.restart_s)} to restart",
        ),
    )
