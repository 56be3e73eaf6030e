"""The page for people, made anew of all JSON files of a machine after each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.parts import Part
from benchmarks.gpu_day.store import PASSED, ResultStore

Facts = dict[str, Any]
Lines = list[str]
DIGITS = 4


def write_summary(store: ResultStore, parts: Sequence[Part]) -> Path:
    """The file that it wrote."""
    store.folder.mkdir(parents=True, exist_ok=True)
    path = store.folder / "summary.md"
    path.write_text(summary(store, parts))
    return path


def summary(store: ResultStore, parts: Sequence[Part]) -> str:
    """Markdown: a row for each part, then a section for each that has results."""
    found = {part.name: record for part in parts if (record := store.read(part.name)) is not None}
    key = store.key
    lines = [
        f"# GPU day: {key.get('accelerator')}",
        "",
        f"`python -m benchmarks.gpu_day`: torch {key.get('torch')}, CUDA {key.get('cuda')}, Python "
        f"{key.get('python')}, code {key.get('code')}. What is measured and how: docs/gpu_day.md. Full numbers: the "
        "JSON files beside this.",
        "",
    ]
    if key.get("tiny"):
        lines += ["A try of the programs on models of no size: none of these numbers is a measurement.", ""]
    if key.get("overrides"):
        lines += [f"Overrides of the trainings: {', '.join(key['overrides'])}.", ""]
    rows = [_part_row(part, found.get(part.name), store) for part in parts]
    lines += [*_table(("part", "outcome", "s", "ended"), rows), ""]
    for part in parts:
        if part.name in found and found[part.name]["items"]:
            lines += [f"## {part.name}", "", *_section(part.name)(found[part.name]["items"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _part_row(part: Part, record: Facts | None, store: ResultStore) -> list[Any]:
    if record is None:
        return [part.name, "not run", "", ""]
    outcome = record["status"] if record["status"] == PASSED else f"{record['status']}: {record.get('problem', '')}"
    other = "" if record.get("key") == store.key else f" (code {record.get('key', {}).get('code')}, other than above)"
    return [part.name, outcome.rstrip(": ") + other, record.get("seconds", ""), record.get("ended", "")]


def _section(part: str) -> Callable[[dict[str, Facts]], Lines]:
    if part.startswith("train-"):
        return _training
    if part.startswith("levers-"):
        return _levers
    kinds = {"environment": _environment, "parity": _parity, "families": _parity, "calibration": _calibration}
    return kinds.get(part, _plain)


def _environment(items: dict[str, Facts]) -> Lines:
    machine, best = items.get("machine", {}), items.get("products and copies", {})
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    lines = [
        f"{machine.get('accelerator')}, {shown(machine.get('accelerator_memory_gib'))} GiB, {machine.get('cores')} "
        f"cores, {shown(machine.get('memory_gib'))} GiB of memory; {machine.get('driver')}. {packages}.",
        "",
    ]
    rates = best.get("product_tflops", {})
    rows = [[f"{name} product of {best.get('product_size')}, TFLOP/s", rate] for name, rate in rates.items()]
    rows += [["copy, GB/s read and written", best.get("copy_gb_per_s")]]
    return lines + _table(("at best", "measured"), rows)


def _parity(items: dict[str, Facts]) -> Lines:
    rows: list[list[Any]] = []
    for name, item in items.items():
        for row in item.get("rows", []):
            worst = row["worst"] or {}
            place = f"{worst.get('quantity', '')}, {worst.get('name', '')}" if worst else _one_line(row["problem"])
            outcome = "pass" if row["passed"] else "FAIL"
            rows.append([name, row["layout"], row["dtype"], place, worst.get("error"), worst.get("bound"), outcome])
        if "problem" in item:
            rows.append([name, "", "", _one_line(item["problem"]), "", "", "FAIL"])
    return _table(("model", "layout", "format", "nearest to its bound", "error", "bound", "result"), rows)


def _training(items: dict[str, Facts]) -> Lines:
    run = items.get("training", {})
    rows: list[list[Any]] = []
    if "tokens_per_second" in run:
        steps = f"median of {run['steps'] - run['warm_up_steps_left_out']} steps after {run['warm_up_steps_left_out']}"
        layout = f"{run['dtype']}, micro-batch {run['micro_batch_size']}, recompute {run['recompute']}"
        batch = f"{run['global_batch_size']} x {run['sequence_length']} tokens a step"
        memory = f"{shown(run['memory_peak_mib'])} (predicted {shown(run['predicted_memory_peak_mib'])})"
        rows = [
            [f"parameters of {run['shape']}", f"{run['parameters']:,}"],
            ["how", f"{layout}; {batch}"],
            [f"tokens/s, {steps}", run["tokens_per_second"]],
            ["MFU", f"{_part(run['mfu'])} ({run['mfu_peak']})"],
            ["step, s", f"{shown(run['step_time_s']['median'])} (predicted {shown(run['predicted_step_time_s'])})"],
            ["peak memory, MiB", memory],
            ["memory predicted / measured", _signed(run["memory_error"])],
            ["start-up, s", run["startup_s"]],
            ["loss, first and last", f"{shown(run['first_loss'])}, {shown(run['last_loss'])}"],
        ]
    rows += [["problem", _one_line(item["problem"])] for item in items.values() if "problem" in item]
    return _table(("", ""), rows)


def _levers(items: dict[str, Facts]) -> Lines:
    head = ("lever", "tokens/s", "model TFLOP/s", "MFU", "peak GiB", "kernels", "GPU idle", "host syncs")
    rows: list[list[Any]] = []
    for name, item in items.items():
        if "tokens_per_second" not in item:
            rows.append([name, _one_line(item.get("refused") or item.get("problem", "")), *[""] * (len(head) - 2)])
            continue
        measured = [item["tokens_per_second"], item["model_tflops"], _part(item["mfu"]), item["memory_peak_gib"]]
        syncs = sum(item["host_syncs"].values()) if "host_syncs" in item else None
        rows.append([name, *measured, item.get("kernels"), _part(item.get("idle")), syncs])
    return _table(head, rows)


def _calibration(items: dict[str, Facts]) -> Lines:
    rows: list[list[Any]] = []
    for name, item in items.items():
        if "fit" not in item:
            rows.append([name, _one_line(item.get("problem", "")), "", "", "", ""])
            continue
        fit = item["fit"]
        for run in fit["runs"]:
            errors = [_signed(run["error_before"]), _signed(run["error"])]
            rows.append([name, run["run"], fit["efficiency"], run["measured_s"], *errors])
    return _table(("fitted on", "run", "efficiency", "step, s", "error before", "error"), rows)


def _plain(items: dict[str, Facts]) -> Lines:
    rows = []
    for name, item in items.items():
        facts = {key: value for key, value in item.items() if key not in ("ended", "seconds")}
        said = "; ".join(f"{key} {_one_line(shown(value))}" for key, value in facts.items() if value not in ([], None))
        rows.append([name, said])
    return _table(("what", "found"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Lines:
    line = "|".join("---" for _ in head)
    cells = [" | ".join(shown(cell).replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {' | '.join(head)} |", f"|{line}|", *(f"| {row} |" for row in cells)]


def shown(value: Any) -> str:
    """A number as one reads it."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{DIGITS}g}"


def _part(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.1%}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
