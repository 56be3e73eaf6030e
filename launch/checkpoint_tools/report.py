"""What the checkpoint commands print: tables for people, plain values for `--json`. No torch.

Names and values come from files that anyone may have made: they are printed as they are, never as markup.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, is_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from launch.checkpoint_tools.facts import Facts, age_words
from launch.checkpoint_tools.listing import Row
from megalite.checkpoint.manifest import printable

if TYPE_CHECKING:
    from launch.checkpoint_tools.difference import Difference, FactDifference, TensorDifference
    from launch.checkpoint_tools.pruning import PrunePlan
    from launch.checkpoint_tools.verification import Verification

NUMBERS = {"step", "age", "size", "evaluation loss", "bytes", "max abs", "max rel", "numbers", "not the same bits"}
TOP = 10  # of what differs, unless all is asked for


def listing_table(rows: Iterable[Row]) -> Table:
    """A row per checkpoint."""
    table = _table("checkpoint", "step", "age", "size", "layout", "evaluation loss", "holds", "state")
    for row in rows:
        _add(
            table,
            f"{row.name} (latest)" if row.is_latest else row.name,
            "" if row.step is None else row.step,
            age_words(row.age_s),
            decimal(row.size),
            row.layout or "",
            "" if row.evaluation_loss is None else f"{row.evaluation_loss:.4f}",
            row.holds or "",
            _state(row),
            style="red" if row.problem else None,
        )
    return table


def left_overs_lines(names: Collection[str]) -> Iterator[str]:
    """A line on what is no checkpoint, if there is any."""
    if names:
        left = f"{len(names)} interrupted saves left folders" if len(names) > 1 else "an interrupted save left a folder"
        yield f"{left}, {printable(', '.join(names))}: the next run removes that, or megalite checkpoint prune"


def _state(row: Row) -> str:
    """Without the path, which the row says already."""
    return "complete" if row.problem is None else row.problem.removeprefix(row.url).lstrip(":/ ")


def facts_lines(url: str, facts: Facts, age_s: float | None) -> Iterator[str]:
    """The facts for people, but for the files."""
    age = "" if age_s is None else " (in the future: was a clock set?)" if age_s < 0 else f" ({age_words(age_s)} ago)"
    position = ", ".join(f"{name} {_short(value)}" for name, value in facts.state.items())
    yield from (
        printable(line)
        for line in (
            f"checkpoint:  {url}",
            f"step:        {facts.step:,}",
            f"written:     {facts.written or 'unknown'}{age}",
            f"written by:  {facts.layout} (any layout reads it)",
            f"holds:       {facts.holds}: {facts.parameters:,} parameters in {facts.tensors} tensors, fp32",
            f"optimizer:   {_optimizer(facts)}",
            f"progress:    {position or 'none: only weights'}",
            *([f"evaluation loss: {facts.evaluation_loss:.6f}"] if facts.evaluation_loss is not None else []),
            *([f"loss scale:  {_pairs(facts.loss_scaler)}"] if facts.loss_scaler else []),
            f"tokenizer:   {facts.tokenizer or 'unknown'}",
        )
    )
    for section in dict.fromkeys(name.partition(".")[0] for name in facts.config):
        options = {k.partition(".")[2]: v for k, v in facts.config.items() if k.startswith(f"{section}.")}
        yield printable(f"{section + ':':<13}{_pairs(options)}")


def _optimizer(facts: Facts) -> str:
    if not facts.moments:
        return f"no moments, {facts.optimizer_steps:,} steps taken"
    return f"{', '.join(facts.moments)}, {facts.optimizer_steps:,} steps taken"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"({len(value)} entries)" if value else "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def files_table(facts: Facts) -> Table:
    """A row per file."""
    table = _table("file", "size", "bytes")
    for name, size in facts.files.items():
        _add(table, name, decimal(size), f"{size:,}")
    return table


def tensors_table(tensors: dict[str, tuple[int, ...]]) -> Table:
    """A row per canonical name."""
    table = _table("tensor", "shape")
    for name, shape in tensors.items():
        _add(table, name, " x ".join(map(str, shape)))
    return table


def prune_table(plan: PrunePlan) -> Table:
    """A row per checkpoint: whether it goes, and why."""
    table = _table("checkpoint", "step", "size", "evaluation loss", "fate")
    for fate in plan.fates:
        loss = "" if fate.evaluation_loss is None else f"{fate.evaluation_loss:.4f}"
        step = "" if fate.step is None else fate.step
        _add(table, fate.name, step, decimal(fate.size), loss, fate.why, style="red" if fate.goes else None)
    return table


def prune_lines(plan: PrunePlan) -> Iterator[str]:
    """What it comes to."""
    if plan.is_empty:
        yield "nothing to delete"
        return
    checkpoints = f"{len(plan.going)} of {len(plan.fates)} checkpoints go ({decimal(plan.freed)})"
    left = f"{len(plan.left_overs)} folders that interrupted saves left go" if plan.left_overs else None
    yield "; ".join(filter(None, (checkpoints if plan.going else None, left)))


def verification_lines(verifications: Iterable[Verification], *, deep: bool) -> Iterator[str]:
    """A line per problem, and one per checkpoint that has none."""
    for verified in verifications:
        yield from verified.problems
        if verified.passed:
            read = "every digest and number" if deep else "manifest, sizes, headers, pieces; --deep reads every byte"
            yield f"{verified.folder}: good: {verified.tensors} tensors, {decimal(verified.size)} ({read})"


def difference_table(difference: Difference, tolerance: float, *, everything: bool) -> Table:
    """The tensors that differ, worst first."""
    table = _table("tensor", "kind", "max abs", "max rel", "not the same bits", "numbers", "verdict")
    for tensor in difference.tensors if everything else _different(difference)[:TOP]:
        within = tensor.within(tolerance)
        _add(
            table,
            tensor.name,
            tensor.kind,
            f"{tensor.max_abs:.2e}",
            f"{tensor.max_rel:.2e}",
            f"{tensor.different:,}",
            f"{tensor.numbers:,}",
            "same bits" if not tensor.different else "within" if within else "differs",
            style=None if within else "red",
        )
    return table


def difference_lines(difference: Difference, tolerance: float, *, everything: bool) -> Iterator[str]:
    """What differs besides numbers, then the verdict."""
    for which, names in ((difference.first, difference.only_in_first), (difference.second, difference.only_in_second)):
        yield from _some([f"only in {which}: {name}" for name in names], everything)
    yield from _some([f"shape of {_fact(fact)}" for fact in difference.shapes], everything)
    yield from _some([_fact(fact) for fact in difference.progress], True)
    yield from _some(
        [f"setting (no matter for the verdict): {_fact(fact)}" for fact in difference.settings], everything
    )
    yield verdict(difference, tolerance)


def verdict(difference: Difference, tolerance: float) -> str:
    """One line."""
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


def _fact(fact: FactDifference) -> str:
    return printable(f"{fact.name}: {fact.first} | {fact.second}")


def _some(lines: list[str], everything: bool) -> list[str]:
    if everything or len(lines) <= TOP:
        return lines
    return [*lines[:TOP], f"... and {len(lines) - TOP} more: --all shows them"]


def as_json(value: Any) -> Any:
    """A dataclass as JSON has it: numbers that it cannot hold become text ("nan", "inf")."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    return str(value) if isinstance(value, Path) else value


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    return table


def _add(table: Table, *cells: object, style: str | None = None) -> None:
    table.add_row(*(Text(printable(str(cell))) for cell in cells), style=style)
