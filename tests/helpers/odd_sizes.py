"""A model that is odd everywhere, and the matrix of layouts that must compute what transformers computes with it.

131 tokens and 101 intermediate features divide by no tp, 5 layers by no pp, 33 tokens by nothing; a single key/value
head is shared by four tensor-parallel ranks. Four stages of two chunks each need a deeper model, of 9 narrow layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from launch.parity.diagnosis import LayoutResult
from launch.parity.layout import ParityLayout
from launch.parity.problem import Dtype, ParityProblem, make_problem
from launch.parity.verify import Plan, References
from megalite.config import Config
from megalite.config.rules.pipeline import SPLITS_BACKWARD
from megalite.config.sections import ContextParallelKind, PipelineSchedule
from tests.helpers.sizes import ODD_SIZES

MODEL = ODD_SIZES | {"num_hidden_layers": 5, "num_key_value_heads": 2}


DEEP = {"num_hidden_layers": 9, "hidden_size": 24, "intermediate_size": 53}

EXPERTS = {  # the first of two stages has none
    "model_type": "qwen3_moe",
    "query_key_norm": "per_head",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 29,
    "mlp_only_layers": [0, 1, 2],
}

Case = tuple[ParityLayout, bool]  # a layout, and whether the head is tied to the embedding
TIED = False, True


def legal_layouts(
    sizes: Sequence[int],
    replicas: Sequence[int],
    accumulations: Sequence[int],
    most: int,
    layers: int = MODEL["num_hidden_layers"],
    context: Sequence[dict[str, Any]] = ({},),
) -> list[ParityLayout]:
    """Every combination that is not refused for every model of so many layers: tp and pp of `sizes`, at most `most`
    ranks, ways in which ranks share sequences."""
    recompute = ("none", "selective", "full")
    schedules: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
    axes = itertools.product(sizes, sizes, replicas, (1, 2, 3), (False, True), recompute, accumulations, schedules)
    layouts = [replace(layout, **shared) for layout in itertools.starmap(ParityLayout, axes) for shared in context]
    return [layout for layout in layouts if _is_legal(layout, most, layers)]


def _is_legal(layout: ParityLayout, most: int, layers: int) -> bool:
    return (
        layout.world_size <= most
        and layout.pieces <= layers
        and layout.allows(layout.accumulation)
        and not (layout.pp == 1 and layout.schedule != "1f1b")
        and not (layout.pp > 1 and layout.zero == 3 and layout.schedule in SPLITS_BACKWARD)
        and not (layout.sequence_parallel and layout.tp == 1)
        and not (layout.dp * layout.cp % layout.ep or (layout.ep > 1 and layout.zero == 3))
    )


def legal_cases(layouts: Iterable[ParityLayout]) -> list[Case]:
    """The layouts with a tied head and without; under ZeRO-3 stages cannot share a weight, and experts are in a model
    of their own, without one."""
    cases = itertools.product(layouts, TIED)
    return [
        (layout, tied)
        for layout, tied in cases
        if not (tied and (layout.ep > 1 or (layout.pp > 1 and layout.zero == 3)))
    ]


def covering(cases: Sequence[Case]) -> list[Case]:
    """A few of the cases that hold every pair of values that any of them holds.

    Greedy, and the same on every call: most defects need two settings at once, hardly any three. Of cases that add as
    many pairs it takes the one that is computed soonest.
    """
    pairs = {case: pairs_of(case) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(pairs[case] & missing), -_work(case[0])))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def _work(layout: ParityLayout) -> int:
    """What its ranks compute, roughly: under ZeRO-3 thrice, for each layer is fetched and let go again."""
    return layout.world_size * layout.accumulation * (3 if layout.zero == 3 else 1)


def pairs_of(case: Case) -> set[object]:
    """Every pair of settings of a case. Of micro-batches it counts whether there are several: two or four are alike."""
    layout, tied = case
    settings = vars(layout) | {"accumulation": layout.accumulation > 1, "tied": tied}
    return set(itertools.combinations(enumerate(settings.values()), 2))


def _is_small(layout: ParityLayout) -> bool:
    """Whether the layout has one micro-batch, or of several the fewest that its schedule takes.

    Two kinds under ZeRO-3 are left out, of which every pair is in others: several micro-batches on three replicas take
    longest, and a tied head on one replica shows nothing.
    """
    fewest = 2 if replace(layout, accumulation=2).allows(2) else 4
    if layout.zero == 3 and (layout.dp == 1 == layout.pp * layout.cp or (layout.dp == 3 and layout.accumulation > 1)):
        return False
    return layout.accumulation in (1, fewest)


SHARED_BY_TWO: list[dict[str, Any]] = [{"cp": 2, "cp_kind": kind} for kind in get_args(ContextParallelKind)]
DEALT_TO_TWO = [shared | {"ep": 2} for shared in ({}, *SHARED_BY_TWO)]
LAYOUTS = legal_layouts(sizes=(1, 2, 4), replicas=(1, 2, 3), accumulations=(1, 4), most=8)
SMALL_LAYOUTS = [
    layout
    for layout in legal_layouts(
        sizes=(1, 2), replicas=(1, 2, 3), accumulations=(1, 2, 4), most=6, context=({}, *SHARED_BY_TWO, *DEALT_TO_TWO)
    )
    if _is_small(layout)
]
DEEP_LAYOUTS = [
    layout
    for layout in legal_layouts(sizes=(1, 2, 4), replicas=(1, 2), accumulations=(8,), most=8, layers=9)
    if layout.pieces == 8  # fewer pieces fit the other model
]
SEED = 7
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Family:
    """Layouts that one problem, and so one reference, serves."""

    tied: bool
    tp4: bool  # one key/value head, so that four ranks share it
    sequence_parallel: bool  # a sequence that can be cut
    deep: bool  # layers for four stages of two chunks
    experts: bool = False

    @classmethod
    def of(cls, layout: ParityLayout, tied: bool) -> Family:
        is_deep = layout.pieces > MODEL["num_hidden_layers"]
        return cls(tied, layout.tp == 4, layout.sequence_parallel, is_deep, layout.ep > 1)

    def problem(self) -> ParityProblem:
        model = {"tie_word_embeddings": self.tied, "num_key_value_heads": 1 if self.tp4 else 2}
        layouts, sizes = (DEEP_LAYOUTS, DEEP) if self.deep else (LAYOUTS, EXPERTS if self.experts else {})
        return problem(layouts, model=model | sizes, sequence=36 if self.sequence_parallel else 33)


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


def sample() -> list[Case]:
    """Small layouts and tied heads that hold every pair of settings; neighbours are of one family."""
    chosen = covering(legal_cases(SMALL_LAYOUTS))  # in which four ranks cut a sequence at most
    return sorted(chosen, key=lambda case: (str(Family.of(*case)), case[0].world_size))


def explain(verdict: LayoutResult) -> str:
    """What a failing test shows."""
    failures = [f"{f.quantity} of {f.name}: {f.error:.1e} > {f.bound:.1e}" for f in verdict.failures]
    return "\n".join([f"{verdict.layout} {verdict.dtype}", verdict.crash or "", *verdict.disagreements, *failures[:8]])
