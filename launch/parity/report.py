"""Output of `megalite verify`: the table of results, sentences, and plain values for `--json`."""

from __future__ import annotations

from typing import Any

import numpy as np

from launch.output import Table, styled
from launch.parity.comparison import Deviation, worst
from launch.parity.diagnosis import AXES, LayoutResult
from launch.parity.problem import ParityProblem
from launch.parity.verify import ParityReport, Plan, known_bad
from megalite.config.batch_stages import shapes_of

COLUMNS = {"loss": ("loss", "evaluation loss"), "norm": ("gradient norm",), "gradient": ("gradient",)}
"""Column of the table -> the kinds of quantities whose worst error it shows."""


def introduction(plan: Plan) -> str:
    """Describes what will be run."""
    model = plan.problem.config.model
    lines = [
        f"{model.model_type}: {model.num_hidden_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_attention_heads} heads ({model.num_key_value_heads} kv), vocabulary {model.vocab_size}; "
        f"{_batches(plan.problem)}, {plan.problem.steps} steps, "
        f"seed {plan.problem.seed}, {', '.join(plan.dtypes)} on {plan.device}"
    ]
    lines += [f"  {change}" for change in plan.problem.changes]
    lines += [f"  left out: {reason}" for reason in plan.left_out]
    known = [sentence for layout in plan.layouts for sentence in known_bad(layout, plan.problem.config, plan.device)]
    lines += [f"  known to go wrong: {sentence}" for sentence in dict.fromkeys(known)]
    return "\n".join(lines)


def _batches(problem: ParityProblem) -> str:
    """Describes the batch, or those of a deep problem one after the other."""
    shapes = shapes_of(problem.config.training)
    cut = (f" in {shape.micro_batches(1)} micro-batches per replica" if problem.is_deep else "" for shape in shapes)
    sizes = (f"{shape.global_batch_size} x {shape.sequence_length} tokens" for shape in shapes)
    return ", then ".join(map("".join, zip(sizes, cut, strict=True)))


def table(report: ParityReport) -> Table:
    """Builds a table with a row per layout: its errors, and the quantity that is nearest to its bound."""
    columns = ("layout", "dtype", *COLUMNS, "nearest to its bound", "error", "bound", "result")
    return Table(
        columns,
        [styled(_row(result), None if result.passed else "red") for result in report.results],
        "relative errors, measured against float64",
        [place for place, name in enumerate(columns) if name not in (*COLUMNS, "error", "bound")],
    )


def _row(result: LayoutResult) -> list[str]:
    cells, outcome = [str(result.layout).replace(",", " "), result.dtype], "pass" if result.passed else "FAIL"
    if result.crash:
        return [*cells, *[""] * len(COLUMNS), result.crash, "", "", outcome]
    for kinds in COLUMNS.values():
        errors = [deviation.error for deviation in result.deviations if deviation.quantity.kind in kinds]
        cells.append(f"{np.max(errors):.1e}" if errors else "")  # keeps NaN; in half precision all may be too noisy
    if result.disagreements and not result.failures:
        return [*cells, result.disagreements[0], "", "", outcome]
    top = worst(result.deviations)
    name = top.name.removeprefix("model.").removesuffix(".weight")
    return [*cells, f"{top.quantity}, {name}", f"{top.error:.1e}", f"{top.bound:.1e}", outcome]


def conclusion(report: ParityReport) -> list[str]:
    """Summarises the result, with the diagnosis of every failure."""
    lines = []
    for diagnosis in report.diagnoses:
        lines.append(f"why {diagnosis.smallest} fails:")
        lines += [f"  - {sentence}" for sentence in diagnosis.sentences]
    plan, failed = report.plan, {result.layout for result in report.results if not result.passed}
    reference = "transformers" if plan.reference == "transformers" else "our serial model"
    computes, count = f"what {reference} computes, in {' and '.join(plan.dtypes)}", len(plan.layouts)
    if failed:
        lines.append(
            f"{len(failed)} of {count} layouts do NOT compute {computes} ({report.seconds:.0f} s; "
            f"--seed {plan.problem.seed} repeats it)"
        )
    else:
        lines.append(f"all {count} layouts compute {computes} ({report.seconds:.0f} s)")
        if all(layout.world_size == 1 for layout in plan.layouts):
            lines.append("but all of them are one process: nothing parallel was verified")
    return lines


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan of a verification for `--json`."""
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
    """Returns the whole result for `--json`."""
    return plan_as_json(report.plan) | {
        "passed": report.passed,
        "seconds": round(report.seconds, 1),
        "layouts": [_result_as_json(result) for result in report.results],
        "diagnoses": [
            {"axes": [AXES[axis] for axis in d.axes], "smallest": str(d.smallest), "sentences": d.sentences}
            for d in report.diagnoses
        ],
    }


def _result_as_json(result: LayoutResult) -> dict[str, Any]:
    return {
        "layout": str(result.layout),
        "dtype": result.dtype,
        "passed": result.passed,
        "seconds": round(result.seconds, 1),
        "crash": result.crash,
        "traceback": result.traceback,
        "disagreements": result.disagreements,
        "worst": _deviation_as_json(worst(result.deviations)) if result.deviations else None,
        "failures": [_deviation_as_json(deviation) for deviation in result.failures],
    }


def _deviation_as_json(deviation: Deviation) -> dict[str, Any]:
    return {
        "training": deviation.quantity.training,
        "quantity": deviation.quantity.kind,
        "name": deviation.name,
        "step": deviation.quantity.step,
        "error": deviation.error,
        "bound": deviation.bound,
        "ratio": deviation.ratio,
    }
