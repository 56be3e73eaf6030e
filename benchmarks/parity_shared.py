"""Layouts whose ranks share sequences or a layer's experts, drawn at random, against transformers.

    python -m benchmarks.parity_shared               # writes benchmarks/results/parity_shared.md; an hour on two cores
    python -m benchmarks.parity_shared --dtype bf16  # writes benchmarks/results/parity_shared_bf16.md
    python -m benchmarks.parity_shared --count 20 --seed 1   # others, printed and not written

What is compared and the bounds: docs/parity.md. Every axis is drawn: sizes of tensor, pipeline, data, context and
expert parallelism on up to 8 ranks, schedule, ZeRO stage, recomputation, micro-batches, a cut sequence, the kind of
context parallelism. What a rule of the config refuses is drawn again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any, get_args

from benchmarks.harness import RESULTS
from benchmarks.parity import outcome, report
from launch.parity.diagnosis import LayoutResult
from launch.parity.layout import ParityLayout
from launch.parity.problem import ParityProblem
from launch.parity.verify import Session
from megalite.config import ConfigError
from megalite.config.sections import ContextParallelKind, PipelineSchedule
from models.families import model_config
from tests.helpers.hub_models import HubModel
from tests.helpers.odd_sizes import problem, references_of

TIMEOUT_S = 900.0  # the machine may be busy
MOST_RANKS, SEQUENCE = 8, 48  # tokens: four ranks cut them in eight chunks, and two more each of these
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SWITCHES: dict[str, dict[str, Any]] = {  # of the odd small models of tests/helpers/hub_models.py
    "llama": {"num_hidden_layers": 3},
    "gemma2": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "olmoe": EXPERTS,
}
AXES = ("cp", "cp_kind", "ep", "zero")
INTRODUCTION = [
    "# Layouts whose ranks share sequences or experts, against transformers",
    "",
    "Drawn at random among those on up to 8 ranks with `cp` or `ep` above 1: every size, schedule, ZeRO stage, kind,",
    f"recomputation and number of micro-batches, of tiny models of {', '.join(SWITCHES)}.",
    "A row holds those that are the same on its axes; the errors are the largest of them.",
    "",
]


def drawn(random: random.Random, of: ParityProblem) -> ParityLayout:
    """Returns a legal layout that shares sequences or experts."""
    while True:
        tp, pp = random.choice((1, 1, 2, 4)), random.choice((1, 1, 2, 3))
        cp, dp = random.choice((1, 2, 2, 4)), random.choice((1, 2, 4))
        ep = random.choice([size for size in (1, 2, 4) if not dp * cp % size]) if of.config.model.num_experts else 1
        layout = ParityLayout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=ep,
            cp_kind=random.choice(get_args(ContextParallelKind)) if cp > 1 else "auto",
            zero=random.choice((1, 2, 3)),
            sequence_parallel=tp > 1 and random.random() < 0.5,
            recompute=random.choice(("none", "selective", "full")),
            accumulation=random.choice((1, 2, 4)),
            schedule=random.choice(get_args(PipelineSchedule)) if pp > 1 else "1f1b",
        )
        most = MOST_RANKS if random.random() < 0.3 else MOST_RANKS // 2  # half as many take a quarter of the time
        if layout.world_size > most or cp * ep == 1 or not layout.allows(layout.accumulation):
            continue
        try:
            layout.config(of.config)
        except ConfigError:
            continue
        return layout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--count", type=int, help="layouts of each model (default: 84, and 20 in 16 bits)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    count = asked.count or (84 if asked.dtype == "fp32" else 20)
    draw, started = random.Random(asked.seed), time.monotonic()
    whole = [ParityLayout(dp=dp, accumulation=many) for dp in (1, 2, 4) for many in (1, 2, 4)]
    sessions, layouts = {}, {}
    for name, switches in SWITCHES.items():
        model = model_config(HubModel(name, name, switches).config().to_diff_dict())
        of = problem(whole, model=model, sequence=SEQUENCE, precision={"dtype": asked.dtype})
        sessions[name] = Session(references_of(of, asked.dtype), TIMEOUT_S)
        layouts[name] = list(dict.fromkeys(drawn(draw, of) for _ in range(10 * count)))[:count]
    results: list[tuple[ParityLayout, LayoutResult]] = []
    for name, layout in ((name, layouts[name][place]) for place in range(count) for name in SWITCHES):
        verdict = sessions[name].run(layout)
        results.append((layout, verdict))
        place = f"[{len(results)}/{count * len(SWITCHES)}] {time.monotonic() - started:5.0f} s"
        print(f"{place} {name} {layout}: {outcome(verdict)}", flush=True)
        if asked.count is None:  # written after each, so that a run that is stopped has a table too
            path = RESULTS / f"parity_shared{f'_{asked.dtype}' * (asked.dtype != 'fp32')}.md"
            path.write_text(report(results, count * len(SWITCHES), INTRODUCTION, asked.dtype, AXES))
    print(report(results, count * len(SWITCHES), INTRODUCTION, asked.dtype, AXES))
    return 0 if all(verdict.passed for _, verdict in results) else 1


if __name__ == "__main__":
    sys.exit(main())
