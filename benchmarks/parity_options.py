"""Every option that makes a run faster or smaller, on every layout, against transformers: `megalite verify` of each.

    python -m benchmarks.parity_options                     # writes benchmarks/results/parity_options.md; an hour
    python -m benchmarks.parity_options --only muon         # options with this word, printed and not written

Layouts are those of `megalite verify --layouts auto` and some more; a layout that an option refuses has its sentence
on the page. The model is that of configs/quickstart.yaml, as verify shrinks it. The losses and the bias of routers have
no reference in transformers: test_experts.py in tests/ranks/models and test_expert_bias.py in
tests/ranks/megalite/engine/statistics compare layouts with each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import harness
from launch.parity.comparison import worst
from launch.parity.diagnosis import LayoutResult
from launch.parity.layout import AUTO, ParityLayout
from launch.parity.verify import make_plan, verify
from megalite.config import Config, ConfigError
from megalite.config.loading.load import load_config
from megalite.config.rules.known_bad import installed_versions

RESULTS = harness.RESULTS / "parity_options.md"
TIMEOUT_S = 300.0  # the machine may be busy
LAYOUTS = (
    *AUTO,
    ParityLayout(tp=2, sequence_parallel=True, recompute="selective"),
    ParityLayout(pp=2, accumulation=4, schedule="interleaved", chunks=2),
    ParityLayout(pp=2, accumulation=4, schedule="dualpipev"),
    ParityLayout(tp=2, dp=2, zero=2, sequence_parallel=True, accumulation=2),
)
OPTIONS = (
    ("performance.compile=blocks", "precision.dtype=bf16"),
    ("precision.float8=rowwise",),
    ("precision.float8=tensorwise",),
    ("performance.compile=blocks", "precision.float8=rowwise"),
    ("optimizer.name=muon",),
    ("optimizer.moments_dtype=bf16", "precision.dtype=bf16"),
    ("optimizer.name=muon", "optimizer.moments_dtype=bf16", "performance.compile=blocks"),
)
Row = dict[str, list[LayoutResult]]  # layout -> its results, one a number format


def verified(config: Config) -> tuple[Row, dict[str, str]]:
    """Runs verify on every layout; returns the results, and why the others are refused."""
    legal, results, refused = [], Row(), dict[str, str]()
    for layout in (replace(each, compile=config.performance.compile) for each in LAYOUTS):
        try:
            layout.config(config)
            legal.append(layout)
        except ConfigError as error:
            refused[_name(layout)] = str(error)
    report = verify(make_plan(config, layouts=";".join(map(str, legal)), timeout_s=TIMEOUT_S))
    for result in report.results:
        results.setdefault(_name(result.layout), []).append(result)
    for diagnosis in report.diagnoses:
        print(*diagnosis.sentences, sep="\n", file=sys.stderr)
    return results, refused


def _name(layout: ParityLayout) -> str:
    return str(replace(layout, compile="auto"))


def page(rows: Sequence[tuple[Sequence[str], Row, dict[str, str]]]) -> str:
    """The results file, up to what is written by hand below it."""
    all_results = [result for _, results, _ in rows for each in results.values() for result in each]
    passed = sum(result.passed for result in all_results)
    lines = harness.header("layout", *("<br>".join(options) for options, _, _ in rows))
    letters: dict[str, str] = {}
    for layout in map(_name, LAYOUTS):
        cells = []
        for _, results, refused in rows:
            if layout in results:
                # of each number format the error that came nearest to its bound, in parts of it
                errors = (
                    f"{worst(each.deviations).excess:.2f}" if each.passed else f"**{each.dtype} FAILS**"
                    for each in results[layout]
                )
                cells.append(", ".join(errors))
            else:
                cells.append(letters.setdefault(refused[layout], chr(ord("a") + len(letters))))
        lines.append(harness.row([layout, *cells]))
    lines += ["", *(f"- {letter}: {sentence}" for sentence, letter in letters.items())]
    return harness.page(
        "Every fast path on every layout, against transformers",
        "benchmarks.parity_options",
        f"{harness.machine(*installed_versions())}. **{passed} of {len(all_results)} pass.** A cell holds, for each "
        "number format that verify runs (float32 first), the error that came nearest to its bound, in parts of it; a "
        "letter is a refusal, below.",
        *lines,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run options that have this word, such as muon")
    asked = parser.parse_args()
    rows = []
    for options in OPTIONS:
        if any(asked.only in option for option in options):
            config = load_config(harness.ROOT / "configs" / "quickstart.yaml", options)
            rows.append((options, *verified(config)))
            if not asked.only:  # after each, so that a run that is stopped has a page too
                harness.renew_page(RESULTS, page(rows))
    print(page(rows))
    return 0 if all(result.passed for _, row, _ in rows for each in row.values() for result in each) else 1


if __name__ == "__main__":
    sys.exit(main())
