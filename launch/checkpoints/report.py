"""Output of the checkpoint commands: tables and sentences, and plain values for `--json`. No torch.

Names and values come from files that anyone may have made: control characters in them are escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.checkpoints.listing import CheckpointRow
from launch.checkpoints.summary import CheckpointSummary, age_text
from launch.output import Table, decimal_size, styled
from megalite.checkpoint.manifest import printable

if TYPE_CHECKING:
    from launch.checkpoints.difference import Difference, TensorDifference, ValueDifference
    from launch.checkpoints.pruning import PrunePlan
    from launch.checkpoints.verification import Verification

NUMBERS = {"step", "age", "size", "evaluation loss", "bytes", "max abs", "max rel", "numbers", "not the same bits"}
MOST_SHOWN = 10  # differences, without --all


def _table(*columns: str, rows: Iterable[tuple[Sequence[object], bool]]) -> Table:
    """Builds a table of rows that are (cells, whether the row is drawn in red)."""
    cells = [styled((printable(str(cell)) for cell in row), "red" if is_red else None) for row, is_red in rows]
    return Table(columns, cells, text_columns=[place for place, name in enumerate(columns) if name not in NUMBERS])


def listing_table(rows: Iterable[CheckpointRow]) -> Table:
    """Builds a table with a row per checkpoint, incomplete ones in red."""
    return _table(
        *("checkpoint", "step", "age", "size", "layout", "evaluation loss", "holds", "state"),
        rows=[
            (
                (
                    f"{row.name} (latest)" if row.is_latest else row.name,
                    "" if row.step is None else row.step,
                    age_text(row.age_s),
                    decimal_size(row.size),
                    row.layout or "",
                    "" if row.evaluation_loss is None else f"{row.evaluation_loss:.4f}",
                    row.holds or "",
                    # the row names the folder already
                    "complete" if row.problem is None else row.problem.removeprefix(row.url).lstrip(":/ "),
                ),
                row.problem is not None,
            )
            for row in rows
        ],
    )


def left_overs_lines(names: Collection[str]) -> Iterator[str]:
    """A line on the folders that interrupted saves left, if there are any."""
    if names:
        left = f"{len(names)} interrupted saves left folders" if len(names) > 1 else "an interrupted save left a folder"
        yield f"{left}, {printable(', '.join(names))}: the next run removes that, or megalite checkpoint prune"


def summary_lines(url: str, facts: CheckpointSummary, age_s: float | None) -> Iterator[str]:
    """The summary of a checkpoint as lines of text, without its files."""
    age = "" if age_s is None else " (in the future: was a clock set?)" if age_s < 0 else f" ({age_text(age_s)} ago)"
    position = ", ".join(f"{name} {_short(value)}" for name, value in facts.state.items())
    yield from (
        printable(line)
        for line in (
            f"checkpoint:  {url}",
            f"step:        {facts.step:,}",
            f"written:     {facts.written or 'unknown'}{age}",
            f"written by:  {facts.layout} (any layout reads it)",
            f"holds:       {facts.holds}: {facts.parameters:,} parameters in {facts.tensors} tensors, fp32",
            f"optimizer:   {', '.join(facts.moments) or 'no moments'}, {facts.optimizer_steps:,} steps taken",
            f"progress:    {position or 'none: only weights'}",
            *([f"evaluation loss: {facts.evaluation_loss:.6f}"] if facts.evaluation_loss is not None else []),
            *([f"loss scale:  {_pairs(facts.loss_scaler)}"] if facts.loss_scaler else []),
            f"tokenizer:   {facts.tokenizer or 'unknown'}",
        )
    )
    for section in dict.fromkeys(name.partition(".")[0] for name in facts.config):
        options = {k.partition(".")[2]: v for k, v in facts.config.items() if k.startswith(f"{section}.")}
        yield printable(f"{section + ':':<13}{_pairs(options)}")


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"({len(value)} entries)" if value else "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def files_table(facts: CheckpointSummary) -> Table:
    """Builds a table with a row per file."""
    rows = [((name, decimal_size(size), f"{size:,}"), False) for name, size in facts.files.items()]
    return _table("file", "size", "bytes", rows=rows)


def tensors_table(tensors: dict[str, tuple[int, ...]]) -> Table:
    """Builds a table with a row per canonical name."""
    rows = [((name, " x ".join(map(str, shape))), False) for name, shape in tensors.items()]
    return _table("tensor", "shape", rows=rows)


def prune_table(plan: PrunePlan) -> Table:
    """Builds a table with a row per checkpoint: whether it is deleted, and why."""
    rows = [
        (
            (
                fate.name,
                "" if fate.step is None else fate.step,
                decimal_size(fate.size),
                "" if fate.evaluation_loss is None else f"{fate.evaluation_loss:.4f}",
                fate.why,
            ),
            fate.goes,
        )
        for fate in plan.fates
    ]
    return _table("checkpoint", "step", "size", "evaluation loss", "fate", rows=rows)


def prune_lines(plan: PrunePlan) -> Iterator[str]:
    """Summarises what a prune deletes."""
    if plan.is_empty:
        yield "nothing to delete"
        return
    checkpoints = f"{len(plan.going)} of {len(plan.fates)} checkpoints go ({decimal_size(plan.freed)})"
    left = f"{len(plan.left_overs)} folders that interrupted saves left go" if plan.left_overs else None
    yield "; ".join(filter(None, (checkpoints if plan.going else None, left)))


def verification_lines(verifications: Iterable[Verification], *, deep: bool) -> Iterator[str]:
    """A line per problem, and one per checkpoint without problems."""
    for verified in verifications:
        yield from verified.problems
        if verified.passed:
            read = "every digest and number" if deep else "manifest, sizes, headers, pieces; --deep reads every byte"
            yield f"{verified.folder}: good: {verified.tensors} tensors, {decimal_size(verified.size)} ({read})"


def difference_table(difference: Difference, tolerance: float, *, everything: bool) -> Table:
    """Builds a table of the tensors that differ, worst first; those beyond `tolerance` in red."""
    tensors = difference.tensors if everything else _different(difference)[:MOST_SHOWN]
    rows = [
        (
            (
                tensor.name,
                tensor.kind,
                f"{tensor.max_abs:.2e}",
                f"{tensor.max_rel:.2e}",
                f"{tensor.different:,}",
                f"{tensor.numbers:,}",
                "same bits" if not tensor.different else "within" if tensor.within(tolerance) else "differs",
            ),
            not tensor.within(tolerance),
        )
        for tensor in tensors
    ]
    return _table("tensor", "kind", "max abs", "max rel", "not the same bits", "numbers", "verdict", rows=rows)


def difference_lines(difference: Difference, tolerance: float, *, everything: bool) -> Iterator[str]:
    """Lists the differences other than numbers, then the verdict."""
    for which, names in ((difference.first, difference.only_in_first), (difference.second, difference.only_in_second)):
        yield from _some([f"only in {which}: {name}" for name in names], everything)
    yield from _some([f"shape of {_difference_line(fact)}" for fact in difference.shapes], everything)
    yield from _some([_difference_line(fact) for fact in difference.progress], True)
    yield from _some(
        [f"setting (no matter for the verdict): {_difference_line(fact)}" for fact in difference.settings], everything
    )
    yield verdict(difference, tolerance)


def verdict(difference: Difference, tolerance: float) -> str:
    """Summarises the comparison in one line."""
    changed = _different(difference)
    beyond = sum(not tensor.within(tolerance) for tensor in changed)
    bound = f"tolerance {tolerance:g} of a tensor's largest number"
    numbers = f"{len(difference.tensors) - len(changed)} of {len(difference.tensors)} tensors have the same bits"
    if difference.is_equal(tolerance):
        return f"equal: {numbers}" + (f", the others are within the {bound}" if changed else "")
    reasons = [f"{beyond} tensors are beyond the {bound}"] if beyond else []
    lonely = len(difference.only_in_first) + len(difference.only_in_second)
    reasons += [f"{lonely} tensors are only in one of them"] if lonely else []
    reasons += [f"{len(difference.shapes)} tensors have another shape"] if difference.shapes else []
    reasons += ["their progress is not the same"] if difference.progress else []
    return f"different: {'; '.join(reasons)}; {numbers}"


def _different(difference: Difference) -> list[TensorDifference]:
    return [tensor for tensor in difference.tensors if tensor.different]


def _difference_line(value: ValueDifference) -> str:
    return printable(f"{value.name}: {value.first} | {value.second}")


def _some(lines: list[str], everything: bool) -> list[str]:
    if everything or len(lines) <= MOST_SHOWN:
        return lines
    return [*lines[:MOST_SHOWN], f"... and {len(lines) - MOST_SHOWN} more: --all shows them"]


def as_json(value: Any) -> Any:
    """Converts a dataclass to plain values; numbers that JSON cannot hold become text ("nan", "inf")."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    return str(value) if isinstance(value, Path) else value
