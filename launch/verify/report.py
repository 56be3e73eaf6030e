"""A verification as people and programs read it."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from launch.verify.command import Plan, Report, known_bad
from launch.verify.diagnosis import AXES, Verdict
from launch.verify.judge import Finding, worst

COLUMNS = {"loss": ("loss", "evaluation loss"), "norm": ("gradient norm",), "gradient": ("gradient",)}
"""Column of the table -> the quantities of which it shows the worst error."""
WIDTH = 160  # of a table that goes to a file or a pipe


def introduction(plan: Plan) -> str:
    """What will be run, before anything is."""
    model, training = plan.problem.config.model, plan.problem.config.training
    lines = [
        f"{model.model_type}: {model.num_hidden_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_attention_heads} heads ({model.num_key_value_heads} kv), vocabulary {model.vocab_size}; "
        f"{training.global_batch_size} x {training.sequence_length} tokens, {plan.problem.steps} steps, "
        f"seed {plan.problem.seed}, {', '.join(plan.dtypes)} on {plan.device}"
    ]
    lines += [f"  {change}" for change in plan.problem.changes]
    lines += [f"  left out: {reason}" for reason in plan.left_out]
    known = [sentence for layout in plan.layouts for sentence in known_bad(layout, plan.problem.config, plan.device)]
    lines += [f"  known to go wrong: {sentence}" for sentence in dict.fromkeys(known)]
    return "\n".join(lines)


def table(report: Report) -> Table:
    """A row per layout: errors of the loss, the norm and the gradients, and what is nearest to its bound."""
    result = Table(title="relative errors, measured against float64", title_justify="left")
    for name in ("layout", "dtype", *COLUMNS, "nearest to its bound", "error", "bound", "result"):
        is_number = name in (*COLUMNS, "error", "bound")
        result.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for verdict in report.verdicts:
        result.add_row(*row(verdict), style=None if verdict.passed else "red")
    return result


def row(verdict: Verdict) -> list[str]:
    """The cells of one layout."""
    cells = [str(verdict.layout).replace(",", " "), verdict.dtype]
    outcome = "pass" if verdict.passed else "FAIL"
    if verdict.crash:
        return [*cells, *[""] * len(COLUMNS), verdict.crash, "", "", outcome]
    for kinds in COLUMNS.values():
        errors = [finding.error for finding in verdict.findings if finding.quantity.kind in kinds]
        cells.append(f"{np.max(errors):.1e}" if errors else "")  # keeps NaN; in half precision all may be too noisy
    if verdict.disagreements and all(finding.passed for finding in verdict.findings):
        return [*cells, verdict.disagreements[0], "", "", outcome]
    top = worst(verdict.findings)
    name = top.name.removeprefix("model.").removesuffix(".weight")
    return [*cells, f"{top.quantity}, {name}", f"{top.error:.1e}", f"{top.bound:.1e}", outcome]


def conclusion(report: Report) -> list[str]:
    """What it comes to, and why where it fails."""
    failed = [verdict for verdict in report.verdicts if not verdict.passed]
    lines = []
    for diagnosis in report.diagnoses:
        lines.append(f"why {diagnosis.smallest} fails:")
        lines += [f"  - {sentence}" for sentence in diagnosis.sentences]
    count, seed, formats = len(report.plan.layouts), report.plan.problem.seed, " and ".join(report.plan.dtypes)
    if failed:
        lines.append(
            f"{len({verdict.layout for verdict in failed})} of {count} layouts do NOT compute what {_who(report)} "
            f"computes, in {formats} ({report.seconds:.0f} s; --seed {seed} repeats it)"
        )
    else:
        lines.append(f"all {count} layouts compute what {_who(report)} computes, in {formats} ({report.seconds:.0f} s)")
        if all(verdict.layout.world_size == 1 for verdict in report.verdicts):
            lines.append("but all of them are one process: nothing parallel was verified")
    return lines


def _who(report: Report) -> str:
    return "transformers" if report.plan.reference == "transformers" else "our serial model"


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """What will be run."""
    return {
        "reference": plan.reference,
        "device": plan.device,
        "dtypes": plan.dtypes,
        "planned": [str(layout) for layout in plan.layouts],
        "left_out": plan.left_out,
        "seed": plan.problem.seed,
        "steps": plan.problem.steps,
        "changes": plan.problem.changes,
        "config": plan.problem.config.model_dump(mode="json"),
    }


def as_json(report: Report) -> dict[str, Any]:
    """Everything a program may want to know."""
    return plan_as_json(report.plan) | {
        "passed": report.passed,
        "seconds": round(report.seconds, 1),
        "layouts": [_verdict(verdict) for verdict in report.verdicts],
        "diagnoses": [
            {"axes": [AXES[axis] for axis in d.axes], "smallest": str(d.smallest), "sentences": d.sentences}
            for d in report.diagnoses
        ],
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "layout": str(verdict.layout),
        "dtype": verdict.dtype,
        "passed": verdict.passed,
        "seconds": round(verdict.seconds, 1),
        "crash": verdict.crash,
        "traceback": verdict.traceback,
        "disagreements": verdict.disagreements,
        "worst": _finding(worst(verdict.findings)) if verdict.findings else None,
        "failures": [_finding(finding) for finding in verdict.failures],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "training": finding.quantity.training,
        "quantity": finding.quantity.kind,
        "name": finding.name,
        "error": finding.error if np.isfinite(finding.error) else None,  # JSON has no NaN
        "bound": finding.bound,
        "ratio": finding.ratio,
    }
