"""Output of `megalite verify`: the table of results, sentences, and plain values for `--json`."""

from __future__ import annotations

from typing import Any

import numpy as np

from launch.output import Table, styled
from launch.parity.comparison import Deviation, worst
from launch.parity.diagnosis import AXES, LayoutResult
from launch.parity.verify import ParityReport, Plan, known_bad

COLUMNS = {"loss": ("loss", "evaluation loss"), "norm": ("gradient norm",), "gradient": ("gradient",)}
"""Column of the table -> the kinds of quantities whose worst error it shows."""


def introduction(plan: Plan) -> str:
    """Describes what will be run."""
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


def table(report: ParityReport) -> Table:
    """Builds a table with a row per layout: its errors, and the quantity that is nearest to its bound."""
    columns = ("layout", "dtype", *COLUMNS, "nearest to its bound", "error", "bound", "result")
    return Table(
        columns,
        [styled(row(verdict), None if verdict.passed else "red") for verdict in report.verdicts],
        "relative errors, measured against float64",
        [place for place, name in enumerate(columns) if name not in (*COLUMNS, "error", "bound")],
    )


def row(verdict: LayoutResult) -> list[str]:
    """Builds the cells of one layout."""
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


def conclusion(report: ParityReport) -> list[str]:
    """Summarises the result, with the diagnosis of every failure."""
    failed = [verdict for verdict in report.verdicts if not verdict.passed]
    lines = []
    for diagnosis in report.diagnoses:
        lines.append(f"why {diagnosis.smallest} fails:")
        lines += [f"  - {sentence}" for sentence in diagnosis.sentences]
    reference = "transformers" if report.plan.reference == "transformers" else "our serial model"
    count, seed, formats = len(report.plan.layouts), report.plan.problem.seed, " and ".join(report.plan.dtypes)
    if failed:
        lines.append(
            f"{len({verdict.layout for verdict in failed})} of {count} layouts do NOT compute what {reference} "
            f"computes, in {formats} ({report.seconds:.0f} s; --seed {seed} repeats it)"
        )
    else:
        lines.append(f"all {count} layouts compute what {reference} computes, in {formats} ({report.seconds:.0f} s)")
        if all(verdict.layout.world_size == 1 for verdict in report.verdicts):
            lines.append("but all of them are one process: nothing parallel was verified")
    return lines


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The plan of a verification for `--json`."""
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


def as_json(report: ParityReport) -> dict[str, Any]:
    """The whole result for `--json`."""
    return plan_as_json(report.plan) | {
        "passed": report.passed,
        "seconds": round(report.seconds, 1),
        "layouts": [_verdict(verdict) for verdict in report.verdicts],
        "diagnoses": [
            {"axes": [AXES[axis] for axis in d.axes], "smallest": str(d.smallest), "sentences": d.sentences}
            for d in report.diagnoses
        ],
    }


def _verdict(verdict: LayoutResult) -> dict[str, Any]:
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


def _finding(finding: Deviation) -> dict[str, Any]:
    return {
        "training": finding.quantity.training,
        "quantity": finding.quantity.kind,
        "name": finding.name,
        "error": finding.error if np.isfinite(finding.error) else None,  # JSON has no NaN
        "bound": finding.bound,
        "ratio": finding.ratio,
    }
