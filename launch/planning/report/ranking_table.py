"""The table of the layouts that fit, the one to take first."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from launch.pages.svg import bar, element, line
from megalite.planner.layout_choice import doubts
from megalite.planner.search import LayoutCandidate, SearchResult
from megalite.units import GIB, digits, gib, of_stages, percent, plural, seconds

MOST_ROWS = 15
TIME_WIDTH, MEMORY_WIDTH, BAR_HEIGHT = 64.0, 48.0, 14.0
WORDS = {"doubts": "words"}  # classes of columns
NOISE = 1.03  # published measurements of one setting differ by this factor


def ranking_table(candidates: Sequence[LayoutCandidate], limit_bytes: float) -> Element:
    """Builds one row per layout, with bars of its step time and of its fullest stage's memory."""
    shown = candidates[:MOST_ROWS]
    taken_s, slowest = shown[0].time.seconds, max(candidate.time.seconds for candidate in shown)
    rows = []
    for number, candidate in enumerate(shown, 1):
        layout, time, fullest = candidate.job.layout, candidate.time, candidate.fullest.total
        row_id, step = f"ranking-{number}", seconds(candidate.time.seconds)
        used = f"{gib(fullest)} of {gib(limit_bytes)}"
        cells = {
            "": str(number),
            "step time": step,
            "MFU": "-" if time.model_flops_utilization is None else percent(time.model_flops_utilization),
            "TP": str(layout.tensor_parallel_size),
            "PP": str(layout.pipeline_parallel_size),
            "DP": str(layout.data_parallel_size),
            "CP": str(layout.context_parallel_size),
            "EP": str(layout.expert_parallel_size),
            "ZeRO": str(layout.zero_stage),
            "micro-batch": str(layout.micro_batch_size),
            "recompute": of_stages(layout.recompute_by_stage),
            "sequence parallel": "yes" if layout.sequence_parallel else "no",
            " ": _inline_bar(f"{row_id}-time", TIME_WIDTH, time.seconds / slowest, "useful", f"{layout}: {step}"),
            "time over the first": f"{100 * (time.seconds / taken_s - 1):+.1f} %" if number > 1 else "",
            "tokens/s per accelerator": f"{candidate.tokens_per_s / layout.world_size:,.0f}",
            "fullest stage, GiB": digits(fullest / GIB),
            "doubts": "; ".join(doubts(candidate, limit_bytes)),
            "  ": _inline_bar(f"{row_id}-memory", MEMORY_WIDTH, fullest / limit_bytes, "total", used),
        }
        class_ = "winner" if number == 1 else None
        columns = [element("td", cell, class_=WORDS.get(name)) for name, cell in cells.items()]
        rows.append(element("tr", columns, id=row_id, class_=class_))
    head = element("tr", [element("th", name.strip(), class_=WORDS.get(name)) for name in cells])
    return element("div", element("table", element("thead", head), element("tbody", rows), id="ranking"), class_="wide")


def _inline_bar(id_: str, width: float, share: float, class_: str, title: str) -> Element:
    """A bar in a cell; a thin line marks its full length."""
    return element(
        "svg",
        bar(0, 0, max(width * min(share, 1.0), 1.0), BAR_HEIGHT, title, id=id_, class_=class_),
        line(width - 0.5, 0, width - 0.5, BAR_HEIGHT, "grid"),
        class_="inline",
        style=f"width:{width:g}px;height:{BAR_HEIGHT:g}px",
    )


def ranking_caption(result: SearchResult) -> str:
    """Summarises the table, and names differences too small to decide."""
    candidates = result.candidates
    text = f"{plural(len(candidates), 'layout')} fit{'s' * (len(candidates) == 1)}"
    text += (
        f"; the one to take and the {MOST_ROWS - 1} fastest of the others are listed"
        if len(candidates) > MOST_ROWS
        else ""
    )
    if too_large := len(result.too_large):
        text += f". {too_large:,} more need too much memory"
    best = candidates[0].time.seconds
    if close := sum(1 / NOISE <= candidate.time.seconds / best <= NOISE for candidate in candidates[1:]):
        text += (
            f". {plural(close, 'layout')} {'are' if close > 1 else 'is'} within {NOISE - 1:.0%} of the first, which is "
            "less than predictions are worth: a short run of the first few decides"
        )
    return f"{text}."
