"""Every legal layout against transformers, once: the tables behind promise 1.

    python -m benchmarks.parity                      # writes benchmarks/results/parity.md; an hour on two cores
    python -m benchmarks.parity --pipelines          # writes benchmarks/results/parity_pipelines.md; half an hour
    python -m benchmarks.parity --dtype fp16         # writes benchmarks/results/parity_fp16.md; a quarter of an hour
    python -m benchmarks.parity --only tp=4          # layouts with these words, printed and not written

What is compared and the bounds: docs/parity.md. The layouts and the models are those of `pytest -m exhaustive`.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import RESULTS, header, row
from launch.parity.comparison import worst
from launch.parity.diagnosis import LayoutResult
from launch.parity.layout import ParityLayout
from launch.parity.problem import Dtype
from launch.parity.verify import Session
from launch.runtime.devices import cpu_count
from megalite.config.rules.known_bad import installed_versions
from tests.helpers.odd_sizes import DEEP_LAYOUTS, LAYOUTS, TIMEOUT_S, Case, Family, legal_cases, references_of, sample

NAMES = {"zero": "ZeRO", "cp_kind": "kind"}
KINDS = {
    "loss": ("loss", "evaluation loss"),
    "norm": ("gradient norm",),
    "logits": ("logits",),
    "gradients": ("gradient",),
}


ODD_MODEL = [
    "",
    "The model is odd on purpose: 131 tokens, 5 layers (9 narrower ones for four stages of two chunks), 4 heads, 2",
    "key/value heads (1 at tp=4), 101 intermediate features, sequences of 33 tokens (36 where they are cut).",
    "",
]
PLAIN = [
    "# Every legal layout without a pipeline against transformers",
    "",
    "Each row holds the layouts with recomputation none, selective and full, with 1 and 4 micro-batches per step, and",
    "with a head that is tied to the embedding or not; the errors are the largest of them.",
    *ODD_MODEL,
]
PIPELINES = [
    "# Every schedule and ZeRO stage of a pipeline against transformers",
    "",
    "Each row holds the layouts without recomputation and with full, and with a head that is tied to the embedding or",
    "not (ZeRO-3 cannot tie it over stages); the errors are the largest of them. A step has 4 micro-batches, and 8",
    "where four stages have two chunks each; at tp=2 the sequence is cut. Left out, as other rows show the same:",
    "selective recomputation, 1 micro-batch, tp=4, dp=3, and tp=2 with whole sequences; `pytest -m exhaustive` has",
    "them.",
    *ODD_MODEL,
]
SAMPLE = [
    "# Layouts in 16 bits against transformers",
    "",
    "The layouts hold every pair of settings (schedule, tp, pp, dp, ZeRO, sequence parallelism, recomputation, several",
    "micro-batches, tied head) at least once; the errors of a row are the largest of its layouts.",
]
EXPLANATION_OF_16_BITS = [
    "Losses, norms: relative to the value; logits, gradients: root of the sum of squares, relative to the array's,",
    "measured against transformers in float64. The bound is twice the error of transformers in the same format over",
    "float32 master weights. Weights and moments after three steps of AdamW on packed documents and of clipped SGD are",
    "compared too: the last column is the error that came nearest to its bound, in parts of it.",
]
EXPLANATION = [
    "Losses, norms: relative to the value; logits, gradients: to the largest entry of their array; measured against",
    "transformers in float64, bounds 2e-5 (loss, norm) and 1e-5. Weights and moments after three steps of AdamW on",
    "packed documents and of clipped SGD are compared too: the last column is the error that came nearest to its",
    "bound, in parts of it.",
]


def is_distinct(layout: ParityLayout) -> bool:
    """True for the layouts of `PIPELINES`."""
    sizes = layout.tp <= 2 and layout.dp <= 2 and layout.accumulation > 1
    return sizes and layout.recompute != "selective" and layout.sequence_parallel == (layout.tp == 2)


def run(cases: list[Case], dtype: Dtype) -> Iterator[tuple[ParityLayout, LayoutResult]]:
    """Yields the verdict on every case; cases of one problem follow each other and share its reference."""
    sessions: dict[Family, Session] = {}
    started = time.monotonic()
    for index, (layout, tied) in enumerate(cases, start=1):
        family = Family.of(layout, tied)
        if family not in sessions:
            sessions[family] = Session(references_of(family.problem(), dtype), TIMEOUT_S)
        verdict = sessions[family].run(layout)
        place = f"[{index}/{len(cases)}] {time.monotonic() - started:5.0f} s"
        print(f"{place} {layout} {'tied' * tied}: {outcome(verdict)}", flush=True)
        yield layout, verdict


def outcome(verdict: LayoutResult) -> str:
    """Returns a verdict in short."""
    return "pass" if verdict.passed else f"FAIL {verdict.crash or verdict.disagreements or worst(verdict.deviations)}"


def report(
    results: list[tuple[ParityLayout, LayoutResult]],
    count: int,
    introduction: list[str],
    dtype: Dtype,
    axes: Sequence[str] = ("schedule", "tp", "pp", "dp", "zero", "sequence_parallel"),
) -> str:
    """A row for all layouts that are the same on `axes`."""
    rows: dict[tuple[Any, ...], list[LayoutResult]] = defaultdict(list)
    for layout, verdict in results:
        rows[tuple(getattr(layout, axis) for axis in axes)].append(verdict)
    passed = sum(verdict.passed for _, verdict in results)
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    lines = [
        *introduction,
        *(EXPLANATION if dtype == "fp32" else EXPLANATION_OF_16_BITS),
        "",
        f"**{passed} of {len(results)} pass**{f' ({count} were asked for)' * (len(results) < count)}. {dtype} on "
        f"{cpu_count()} cores of {platform.machine()}, gloo, Python {platform.python_version()}, {versions}.",
        "",
        *header(*(NAMES.get(axis, axis.replace("_", " ")) for axis in axes), "pass", *KINDS, "of the bound"),
    ]
    for at, verdicts in sorted(rows.items()):
        findings = [finding for verdict in verdicts for finding in verdict.deviations]
        errors = [max((f.error for f in findings if f.quantity.kind in kinds), default=0.0) for kinds in KINDS.values()]
        cells = [
            *({True: "yes", False: "no"}[v] if isinstance(v, bool) else v for v in at),
            f"{sum(v.passed for v in verdicts)}/{len(verdicts)}",
        ]
        cells += [f"{error:.0e}" for error in errors]
        lines.append(row([*cells, f"{worst(findings).excess:.2f}" if findings else "-"]))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="16 bits: a sample of layouts"
    )
    parser.add_argument("--pipelines", action="store_true", help="run the layouts with several stages")
    parser.add_argument("--only", default="", help="run layouts that have these words, such as tp=4,pp=2")
    asked = parser.parse_args()
    words = set(filter(None, asked.only.split(",")))
    layouts = [layout for layout in [*LAYOUTS, *DEEP_LAYOUTS] if words <= set(str(layout).split(","))]
    if not words:
        layouts = [
            layout
            for layout in layouts
            if (layout.pp > 1) == asked.pipelines and (layout.pp == 1 or is_distinct(layout))
        ]
    cases = sorted(legal_cases(layouts), key=lambda case: str(Family.of(*case)))
    introduction, name = (PIPELINES, "parity_pipelines") if asked.pipelines else (PLAIN, "parity")
    if asked.dtype != "fp32":
        introduction, name = SAMPLE, f"parity_{asked.dtype}"
        cases = cases if words else sample()
    results = []
    for result in run(cases, asked.dtype):  # written after each, so that a run that is stopped has a table too
        results.append(result)
        if not words:
            (RESULTS / f"{name}.md").write_text(report(results, len(cases), introduction, asked.dtype))
    print(report(results, len(cases), introduction, asked.dtype))
    return 0 if all(verdict.passed for _, verdict in results) else 1


if __name__ == "__main__":
    sys.exit(main())
