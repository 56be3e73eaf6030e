"""Peak memory of each rank, beside what was predicted for its stage."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from launch.inspection.page.page_data import PageData
from launch.pages.sections import PageSection, keys, number_table
from launch.pages.svg import WIDE, AxisScale, BarRows, Child, at_both_widths, bar, drawing, horizontal_axis, line
from launch.prediction.prediction import format_error
from megalite.units import MIB, gib, plural

NAMES, VALUES = 136.0, 110.0  # pixels
MOST_ROWS = 32


def memory_section(found: PageData) -> PageSection:
    """Draws measured peaks as bars and predictions as marks; of many ranks the fullest one of each stage."""
    measured, stages, title = _measured(found), found.receipt.prediction.memory, "Peak memory by rank"
    predicted = {one.stage: peak * MIB for one in stages if one.stage is not None and (peak := one.peak_mib or 0) > 0}
    if not measured:
        return PageSection(
            "memory", title, "The peaks of ranks are measured at the end of a run, and are not on record."
        )
    shown = measured
    if len(shown) > MOST_ROWS:
        fullest: dict[int, tuple[int, int, float]] = {}
        for one in measured:
            if one[1] not in fullest or fullest[one[1]][2] < one[2]:
                fullest[one[1]] = one
        shown = [fullest[stage] for stage in sorted(fullest)][:: 1 + (len(fullest) - 1) // MOST_ROWS]
    figure = at_both_widths(lambda width: _bars(shown, predicted, width))
    names = [("fill-0", "measured"), *([("fill-6", "predicted")] if predicted else [])]
    figure.append(keys(names))
    rows = [
        [
            str(rank),
            str(stage),
            gib(peak),
            gib(predicted[stage]) if stage in predicted else "",
            format_error(predicted[stage], peak) if stage in predicted else "",
        ]
        for rank, stage, peak in shown
    ]
    table = number_table(["rank", "stage", "measured", "predicted", ""], rows, words=[4])
    caption = "The largest amount that a rank needed: allocated on a GPU, resident memory of the process on a CPU."
    if len(shown) < len(measured):
        caption += f" Of {plural(len(measured), 'rank')} {len(shown)} are drawn, each the fullest of its stage."
    if not predicted:
        caption += " There is no prediction of it."
    return PageSection("memory", title, caption, figure, table)


def _measured(found: PageData) -> list[tuple[int, int, float]]:
    """Returns rank, stage and peak in bytes of each rank that has one."""
    ranks, mesh = found.receipt.measured.ranks, found.mesh
    if mesh is None:
        return []
    return [
        (rank, mesh.coordinate(rank).pipeline_rank, peak * MIB)
        for rank, one in enumerate(ranks[: mesh.world_size])
        if (peak := one.peak_mib or 0.0) > 0
    ]


def _bars(shown: Sequence[tuple[int, int, float]], predicted: dict[int, float], width: float) -> Element:
    height = 20.0 if len(shown) <= 16 else 10.0
    most = max([peak for *_, peak in shown] + [predicted.get(stage, 0.0) for _, stage, _ in shown])
    places = BarRows(width, NAMES, VALUES, height, len(shown))
    scale = AxisScale(0.0, most, places.left, places.right)
    unit = 2 ** (
        10 * max(0, (int(most).bit_length() - 1) // 10)
    )  # so that ticks are round in the unit they are told in
    about = 6 if width == WIDE else 3
    ticks = [tick * unit for tick in AxisScale(0.0, most / unit, places.left, places.right).ticks(about)]
    named = {tick: gib(tick) if tick else "0" for tick in ticks}
    drawn: list[Child] = [horizontal_axis(scale, places.top - 4, places.bottom, named, "peak memory")]
    for row, (rank, stage, peak) in enumerate(shown):
        y, title = places.y(row), f"rank {rank}, stage {stage}: measured {gib(peak)}"
        long = scale(peak) - places.left
        drawn += [
            places.words(row, f"stage {stage} rank {rank}", gib(peak)),
            bar(places.left, y, long, height, title, id=f"memory-{rank}", class_="fill-0"),
        ]
        if stage in predicted:
            x = scale(predicted[stage])
            drawn.append(line(x, y - 2, x, y + height + 2, "predicted-mark", f"memory-predicted-{rank}"))
    description = "Peak memory of each rank, measured and predicted"
    return drawing("memory-drawing", description, width, places.bottom + 46, drawn)
