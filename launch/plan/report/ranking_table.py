"""The layouts that fit, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from launch.plan.report.elements import Child, bar, element, extend, line
from megalite.planner.search import Candidate, SearchResult
from megalite.planner.units import GIB, digits, gib, percent, plural, seconds

MOST_ROWS = 15
TIME_WIDTH, MEMORY_WIDTH, BAR_HEIGHT = 84.0, 48.0, 14.0
NOISE = 1.03  # published measurements of one setting differ by as much
HEADS = ("TP", "PP", "DP", "ZeRO", "micro-batch", "recompute", "sequence parallel")


def ranking_table(candidates: Sequence[Candidate], limit_bytes: float) -> Element:
    """One row a layout, with bars of its step time and of its fullest stage's memory."""
    shown = candidates[:MOST_ROWS]
    interleaved = any(candidate.job.layout.interleave > 1 for candidate in shown)
    slowest = max(candidate.time.seconds for candidate in shown)
    heads = ["", *HEADS, *["interleave"] * interleaved]
    cells: list[Element] = [element("th", head) for head in heads]
    cells += [element("th", "step time"), element("th"), element("th", "slower by"), element("th", "MFU")]
    cells += [element("th", "tokens/s per accelerator"), element("th", "fullest stage, GiB"), element("th")]
    rows = [
        _row(index, candidate, shown[0], slowest, limit_bytes, interleaved) for index, candidate in enumerate(shown)
    ]
    table = element("table", element("thead", element("tr", *cells)), element("tbody", *rows), id="ranking")
    return element("div", table, class_="wide")


def _row(
    index: int, candidate: Candidate, best: Candidate, slowest: float, limit_bytes: float, interleaved: bool
) -> Element:
    layout, time = candidate.job.layout, candidate.time
    fullest = candidate.fullest.total
    id_, behind = f"ranking-{index + 1}", time.seconds / best.time.seconds - 1
    rate = candidate.tokens_per_s / layout.world_size
    texts = [str(index + 1), str(layout.tensor_parallel_size), str(layout.pipeline_parallel_size)]
    texts += [str(layout.data_parallel_size), str(layout.zero_stage), str(layout.micro_batch_size), layout.recompute]
    texts += ["yes" if layout.sequence_parallel else "no", *[str(layout.interleave)] * interleaved]
    cells: list[Child] = [
        *texts,
        seconds(time.seconds),
        _inline(f"{id_}-time", TIME_WIDTH, time.seconds / slowest, "useful", f"{layout}: {seconds(time.seconds)}"),
        percent(behind) if index else "",
        percent(time.model_flops_utilization),
        f"{rate:,.0f}",
        digits(fullest / GIB),
        _inline(f"{id_}-memory", MEMORY_WIDTH, fullest / limit_bytes, "total", f"{gib(fullest)} of {gib(limit_bytes)}"),
    ]
    row = element("tr", id=id_, class_="winner" if index == 0 else None)
    return extend(row, *(element("td", cell) for cell in cells))


def _inline(id_: str, width: float, part: float, kind: str, title: str) -> Element:
    """A bar in a cell; a thin line marks where it would be full."""
    svg = element("svg", class_="inline", style=f"width:{width:g}px;height:{BAR_HEIGHT:g}px")
    filled = bar(0, 0, max(width * min(part, 1.0), 1.0), BAR_HEIGHT, title, id=id_, class_=kind)
    return extend(svg, filled, line(width - 0.5, 0, width - 0.5, BAR_HEIGHT, "grid"))


def ranking_words(result: SearchResult) -> str:
    """What the table shows, and how to read small differences."""
    candidates = result.candidates
    words = f"{plural(len(candidates), 'layout')} fit{'s' * (len(candidates) == 1)}"
    words += f"; the {MOST_ROWS} fastest are listed" if len(candidates) > MOST_ROWS else ""
    if too_large := len(result.too_large):
        words += f". {too_large:,} more need too much memory"
    best = candidates[0].time.seconds
    if close := sum(candidate.time.seconds <= NOISE * best for candidate in candidates[1:]):
        words += (
            f". {plural(close, 'layout')} {'are' if close > 1 else 'is'} within {NOISE - 1:.0%} of the first, which is "
            "less than predictions are worth: a short run of the first few decides"
        )
    return f"{words}."
