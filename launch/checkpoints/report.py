"""Output of the checkpoint commands: tables and sentences, and plain values for `--json`. No torch.

Names and values come from files that anyone may have made: control characters in them are escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from data_pipeline.storage.paths import decimal_size
from launch.output import Cell, Table, styled
from megalite.checkpoint.manifest import printable

if TYPE_CHECKING:
    from launch.checkpoints.difference import Difference, ValueDifference
    from launch.checkpoints.pruning import PrunePlan
    from launch.checkpoints.verification import Verification

NUMBERS = {"step", "age", "size", "evaluation loss", "bytes", "max abs", "max rel", "numbers", "not the same bits"}
AGE_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
MOST_SHOWN = 10  # differences, without --all


def _table(*columns: str, rows: Iterable[list[Cell]]) -> Table:
    return Table(columns, list(rows), text_columns=[place for place, name in enumerate(columns) if name not in NUMBERS])


def _row(*cells: object, is_red: bool = False) -> list[Cell]:
    """Returns the cells of a row, empty ones for None."""
    return styled((printable("" if cell is None else str(cell)) for cell in cells), "red" if is_red else None)


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def listing_table(folders: Iterable[Mapping[str, Any]]) -> Table:
    """Builds a table with a row per checkpoint folder (`summarize_folder`), incomplete ones in red."""
    rows = []
    for folder in folders:
        name, problem = folder["name"], folder["problem"]
        rows.append(
            _row(
                f"{name} (latest)" if folder["is_latest"] else name,
                folder["step"],
                age_text(folder["age_s"]),
                decimal_size(folder["size"]),
                folder["layout"],
                _loss(folder["evaluation_loss"]),
                folder["holds"],
                # the row names the folder already
                "complete" if problem is None else problem.removeprefix(folder["url"]).lstrip(":/ "),
                is_red=problem is not None,
            )
        )
    return _table("checkpoint", "step", "age", "size", "layout", "evaluation loss", "holds", "state", rows=rows)


def age_text(seconds: float | None) -> str:
    """Returns an age with its unit, such as `3 h`; empty where unknown."""
    if seconds is None:
        return ""
    if seconds < 0:
        return "in the future"
    size, unit = next((u for u in AGE_UNITS if seconds >= u[0]), AGE_UNITS[-1])
    return f"{int(seconds // size)} {unit}"


def left_overs_lines(names: Collection[str]) -> Iterator[str]:
    """Yields a line on the folders that interrupted saves left, if there are any."""
    if names:
        left = f"{len(names)} interrupted saves left folders" if len(names) > 1 else "an interrupted save left a folder"
        yield f"{left}, {printable(', '.join(names))}: the next run removes that, or megalite checkpoint prune"


def summary_lines(url: str, facts: Mapping[str, Any], age_s: float | None) -> Iterator[str]:
    """Yields the summary of a checkpoint (`summarize_checkpoint`) as lines of text, without its files."""
    age = "" if age_s is None else " (in the future: was a clock set?)" if age_s < 0 else f" ({age_text(age_s)} ago)"
    moments, loss = ", ".join(facts["moments"]), facts["evaluation_loss"]
    relative = " (relative to the checkpoint)" if str(facts["tokenizer"]).startswith("..") else ""
    lines = [
        f"checkpoint:  {url}",
        f"step:        {facts['step']:,}",
        f"written:     {facts['written'] or 'unknown'}{age}",
        f"written by:  {facts['layout']} (any layout reads it)",
        f"holds:       {facts['holds']}: {facts['parameters']:,} parameters in {facts['tensors']} tensors, fp32",
        f"optimizer:   {moments or 'no moments'}, {facts['optimizer_steps']:,} steps taken",
        f"progress:    {_pairs(facts['state']) or 'none: only weights'}",
        *([f"evaluation loss: {loss:.6f}"] if loss is not None else []),
        *([f"loss scale:  {_pairs(facts['loss_scaler'])}"] if facts["loss_scaler"] else []),
        f"tokenizer:   {facts['tokenizer'] or 'unknown'}{relative}",
    ]
    for section in dict.fromkeys(name.partition(".")[0] for name in facts["config"]):
        options = {k.partition(".")[2]: v for k, v in facts["config"].items() if k.startswith(f"{section}.")}
        lines.append(f"{section + ':':<13}{_pairs(options)}")
    yield from map(printable, lines)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"({len(value)} entries)" if value else "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def files_table(files: Mapping[str, int]) -> Table:
    """Builds a table with a row per file."""
    return _table("file", "size", "bytes", rows=[_row(name, decimal_size(n), f"{n:,}") for name, n in files.items()])


def tensors_table(tensors: Mapping[str, tuple[int, ...]]) -> Table:
    """Builds a table with a row per canonical name."""
    return _table("tensor", "shape", rows=[_row(name, " x ".join(map(str, n))) for name, n in tensors.items()])


def prune_table(plan: PrunePlan) -> Table:
    """Builds a table with a row per checkpoint: whether it is deleted, and why."""
    rows = [
        _row(fate.name, fate.step, decimal_size(fate.size), _loss(fate.evaluation_loss), fate.why, is_red=fate.goes)
        for fate in plan.fates
    ]
    return _table("checkpoint", "step", "size", "evaluation loss", "fate", rows=rows)


def prune_line(plan: PrunePlan) -> str:
    """Summarises what a prune deletes."""
    freed = decimal_size(sum(fate.size for fate in plan.to_delete))
    parts = [f"{len(plan.to_delete)} of {len(plan.fates)} checkpoints go ({freed})"] if plan.to_delete else []
    parts += [f"{len(plan.left_overs)} folders that interrupted saves left go"] if plan.left_overs else []
    return "; ".join(parts) or "nothing to delete"


def verification_lines(verifications: Iterable[Verification], *, deep: bool) -> Iterator[str]:
    """Yields a line per problem, and one per checkpoint without problems."""
    for verified in verifications:
        yield from verified.problems
        if verified.passed:
            read = "every digest and number" if deep else "manifest, sizes, headers, pieces; --deep reads every byte"
            yield f"{verified.folder}: good: {verified.tensors} tensors, {decimal_size(verified.size)} ({read})"


def difference_table(difference: Difference, tolerance: float, *, everything: bool) -> Table:
    """Builds a table of the tensors that differ, worst first; those beyond `tolerance` in red."""
    rows = []
    for tensor in difference.tensors if everything else difference.different[:MOST_SHOWN]:
        is_within = tensor.within(tolerance)
        numbers = (f"{tensor.max_abs:.2e}", f"{tensor.max_rel:.2e}", f"{tensor.different:,}", f"{tensor.numbers:,}")
        verdict = "same bits" if not tensor.different else "within" if is_within else "differs"
        rows.append(_row(tensor.name, tensor.kind, *numbers, verdict, is_red=not is_within))
    return _table("tensor", "kind", "max abs", "max rel", "not the same bits", "numbers", "verdict", rows=rows)


def difference_lines(difference: Difference, tolerance: float, *, everything: bool) -> Iterator[str]:
    """Yields the differences other than numbers, then the conclusion."""

    def lines(prefix: str, values: Iterable[ValueDifference]) -> list[str]:
        return [printable(f"{prefix}{value.name}: {value.first} | {value.second}") for value in values]

    for which, names in ((difference.first, difference.only_in_first), (difference.second, difference.only_in_second)):
        yield from _some([f"only in {which}: {name}" for name in names], everything)
    yield from _some(lines("shape of ", difference.shapes), everything)
    yield from lines("", difference.progress)
    yield from _some(lines("setting (no matter for the verdict): ", difference.settings), everything)
    yield _conclusion(difference, tolerance)


def _conclusion(difference: Difference, tolerance: float) -> str:
    """Summarises the comparison in one line."""
    changed = difference.different
    beyond = sum(not tensor.within(tolerance) for tensor in changed)
    bound = f"tolerance {tolerance:g} of a tensor's largest number"
    numbers = f"{len(difference.tensors) - len(changed)} of {len(difference.tensors)} tensors have the same bits"
    if difference.is_equal(tolerance):
        return f"equal: {numbers}" + (f", the others are within the {bound}" if changed else "")
    reasons = [f"{beyond} tensors are beyond the {bound}"] if beyond else []
    unmatched = len(difference.only_in_first) + len(difference.only_in_second)
    reasons += [f"{unmatched} tensors are only in one of them"] if unmatched else []
    reasons += [f"{len(difference.shapes)} tensors have another shape"] if difference.shapes else []
    reasons += ["their progress is not the same"] if difference.progress else []
    return f"different: {'; '.join(reasons)}; {numbers}"


def _some(lines: list[str], everything: bool) -> list[str]:
    if everything or len(lines) <= MOST_SHOWN:
        return lines
    return [*lines[:MOST_SHOWN], f"... and {len(lines) - MOST_SHOWN} more: --all shows them"]


def as_json(value: Any) -> Any:
    """Converts dataclasses to plain values; numbers that JSON cannot hold become text ("nan", "inf")."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
