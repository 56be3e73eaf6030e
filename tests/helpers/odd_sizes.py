"""A model that is odd everywhere, and the matrix of layouts that must compute what transformers computes with it.

131 tokens and 101 intermediate features divide by no tp, 5 layers by no pp, 33 tokens by nothing; a single key/value
head is shared by four tensor-parallel ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.parity.diagnosis import LayoutResult
from launch.parity.layout import ParityLayout, Recompute
from launch.parity.problem import Dtype, ParityProblem, make_problem
from launch.parity.verify import Plan, References
from megalite.config import Config

MODEL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 101,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def legal_layouts(
    sizes: Sequence[int], replicas: Sequence[int], accumulations: Sequence[int], most: int
) -> list[ParityLayout]:
    """Every combination that is not refused for every model: tp and pp of `sizes`, at most `most` ranks."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    axes = itertools.product(sizes, sizes, replicas, (1, 2, 3), (False, True), recompute, accumulations)
    layouts = [ParityLayout(*values) for values in axes]
    return [
        layout
        for layout in layouts
        if layout.world_size <= most
        and not (layout.pp > 1 and layout.zero > 1)
        and not (layout.sequence_parallel and layout.tp == 1)
    ]


def covering(layouts: Iterable[ParityLayout], other: Sequence[bool] = (False,)) -> list[tuple[ParityLayout, bool]]:
    """A few of `layouts`, with a switch of the model, that hold every pair of values that any of them holds.

    Greedy, and the same on every call: most defects need two settings at once, hardly any three.
    """
    cases = list(itertools.product(layouts, other))
    pairs = {case: set(itertools.combinations(enumerate([*vars(case[0]).values(), case[1]]), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(pairs[case] & missing), -case[0].world_size))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


LAYOUTS = legal_layouts(sizes=(1, 2, 4), replicas=(1, 2, 3), accumulations=(1, 3), most=8)
SMALL_LAYOUTS = legal_layouts(sizes=(1, 2), replicas=(1, 2, 3), accumulations=(1, 3), most=6)
SEED = 7
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Family:
    """Layouts that one problem, and so one reference, serves."""

    tied: bool
    tp4: bool  # one key/value head, so that four ranks share it
    sequence_parallel: bool  # a sequence that can be cut

    @classmethod
    def of(cls, layout: ParityLayout, tied: bool) -> Family:
        return cls(tied, layout.tp == 4, layout.sequence_parallel)

    def problem(self) -> ParityProblem:
        model = {"tie_word_embeddings": self.tied, "num_key_value_heads": 1 if self.tp4 else 2}
        return problem(LAYOUTS, model=model, sequence=36 if self.sequence_parallel else 33)


def config_of(sequence: int = 33, **sections: dict[str, Any]) -> Config:
    """A config of the odd model in float32."""
    values: dict[str, Any] = {
        "run_dir": "unused",
        "data": {"path": "unused"},
        "precision": {"dtype": "fp32"},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"global_batch_size": 1, "micro_batch_size": 1, "sequence_length": sequence, "steps": 1},
    }
    for name, section in ({"model": MODEL} | sections).items():
        values[name] = values.get(name, {}) | (MODEL if name == "model" else {}) | section
    return Config.model_validate(values)


def problem(
    layouts: Sequence[ParityLayout],
    model: dict[str, Any] | None = None,
    sequence: int = 33,
    keep_dropout: bool = False,
    steps: int = 3,
    **sections: dict[str, Any],
) -> ParityProblem:
    """What the layouts are asked to compute."""
    config = config_of(sequence, model=model or {}, **sections)
    # sequences are as long as asked, also where a layout among `layouts` could not cut them
    whole = [ParityLayout(dp=layout.dp, accumulation=layout.accumulation) for layout in layouts]
    return make_problem(config, whole, seed=SEED, steps=steps, full=True, keep_dropout=keep_dropout)


def references_of(problem: ParityProblem, dtype: Dtype = "fp32", reference: str = "transformers") -> References:
    """The problem's right answers."""
    return References(Plan(problem, (), (), (dtype,), reference, "cpu", TIMEOUT_S), dtype)


def sample() -> list[tuple[ParityLayout, bool]]:
    """Small layouts and tied heads that hold every pair of settings; neighbours are of one family."""
    return sorted(covering(SMALL_LAYOUTS, (False, True)), key=lambda case: (str(Family.of(*case)), case[0].world_size))


def explain(verdict: LayoutResult) -> str:
    """What a failing test shows."""
    failures = [f"{f.quantity} of {f.name}: {f.error:.1e} > {f.bound:.1e}" for f in verdict.failures]
    return "\n".join([f"{verdict.layout} {verdict.dtype}", verdict.crash or "", *verdict.disagreements, *failures[:8]])
