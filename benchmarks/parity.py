"""Every legal layout against transformers, once: the table behind promise 1.

    python -m benchmarks.parity                      # about an hour on two cores; writes benchmarks/results/parity.md
    python -m benchmarks.parity --only tp=4          # layouts with these words, printed and not written

What is compared and the bounds: docs/parity.md. The layouts and the model are those of `pytest -m exhaustive`.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path

from launch.parity.comparison import worst
from launch.parity.diagnosis import LayoutResult
from launch.parity.layout import ParityLayout
from launch.parity.verify import Session
from launch.runtime.devices import cpu_count
from megalite.config.known_bad import installed_versions
from tests.helpers.odd_sizes import LAYOUTS, TIMEOUT_S, Family, references_of

RESULTS = Path(__file__).parent / "results" / "parity.md"
KINDS = {
    "loss": ("loss", "evaluation loss"),
    "norm": ("gradient norm",),
    "logits": ("logits",),
    "gradients": ("gradient",),
}


def run(cases: list[tuple[ParityLayout, bool]]) -> list[tuple[ParityLayout, bool, LayoutResult]]:
    """The verdict on every case; cases of one problem follow each other and share its reference."""
    sessions: dict[Family, Session] = {}
    results = []
    started = time.monotonic()
    for index, (layout, tied) in enumerate(cases, start=1):
        family = Family.of(layout, tied)
        if family not in sessions:
            sessions[family] = Session(references_of(family.problem()), TIMEOUT_S)
        verdict = sessions[family].run(layout)
        results.append((layout, tied, verdict))
        outcome = (
            "pass" if verdict.passed else f"FAIL {verdict.crash or verdict.disagreements or worst(verdict.deviations)}"
        )
        print(
            f"[{index}/{len(cases)}] {time.monotonic() - started:5.0f} s {layout} {'tied' * tied}: {outcome}",
            flush=True,
        )
    return results


def report(results: list[tuple[ParityLayout, bool, LayoutResult]]) -> str:
    """A row per (tp, pp, dp, zero, sequence parallel), over recomputation, accumulation and tied heads."""
    rows: dict[tuple[int, int, int, int, bool], list[LayoutResult]] = defaultdict(list)
    for layout, _, verdict in results:
        rows[layout.tp, layout.pp, layout.dp, layout.zero, layout.sequence_parallel].append(verdict)
    passed = sum(verdict.passed for *_, verdict in results)
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    lines = [
        "# Every legal layout against transformers",
        "",
        f"{passed} of {len(results)} pass. Each row holds the layouts with recomputation none, selective and full,",
        "with 1 and 3 micro-batches per step, and with a head that is tied to the embedding or not; the errors are the",
        "largest of them. Losses, norms: relative to the value; logits, gradients: to the largest entry of their",
        "array; measured against transformers in float64, bounds 2e-5 (loss, norm) and 1e-5. Weights and moments after",
        "three steps of AdamW and of clipped SGD are compared too: the last column is the error that came nearest to",
        "its bound, in parts of it.",
        "",
        "The model is odd on purpose: 131 tokens, 5 layers, 4 heads, 2 key/value heads (1 at tp=4), 101 intermediate",
        "features, sequences of 33 tokens (36 where they are cut), micro-batches of 2, 3, 6, 9 and 18.",
        "",
        f"`python -m benchmarks.parity`: float32 on {cpu_count()} cores of {platform.machine()}, gloo, Python "
        f"{platform.python_version()}, {versions}.",
        "",
        "| tp | pp | dp | ZeRO | sequence parallel | pass | " + " | ".join(KINDS) + " | of the bound |",
        "|---:|---:|---:|---:|---|---:|" + "---:|" * (len(KINDS) + 1),
    ]
    for (tp, pp, dp, zero, is_cut), verdicts in sorted(rows.items()):
        findings = [finding for verdict in verdicts for finding in verdict.deviations]
        errors = [max(f.error for f in findings if f.quantity.kind in kinds) for kinds in KINDS.values()]
        cells = [tp, pp, dp, zero, "yes" if is_cut else "no", f"{sum(v.passed for v in verdicts)}/{len(verdicts)}"]
        cells += [f"{error:.0e}" for error in errors]
        lines.append(f"| {' | '.join(map(str, cells))} | {worst(findings).excess:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run layouts that have these words, such as tp=4,pp=2")
    words = set(filter(None, parser.parse_args().only.split(",")))
    cases = [case for case in itertools.product(LAYOUTS, (False, True)) if words <= set(str(case[0]).split(","))]
    results = run(sorted(cases, key=lambda case: str(Family.of(*case))))
    text = report(results)
    print(text)
    if not words:
        RESULTS.write_text(text)
    return 0 if all(verdict.passed for *_, verdict in results) else 1


if __name__ == "__main__":
    sys.exit(main())
