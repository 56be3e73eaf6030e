"""A deep comparison: the config's own layout through the batches and sources of all stages, gradients in each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest

from launch.parity.diagnosis import LayoutResult, diagnose
from launch.parity.layout import ParityLayout
from launch.parity.verify import Plan, References, Session, make_plan
from tests.helpers import defects
from tests.helpers.odd_sizes import TIMEOUT_S, config_of, explain

OWN = ParityLayout(pp=2, accumulation=6, schedule="interleaved")
BATCHES = {
    "global_batch_size": 6,
    "micro_batch_size": 1,
    "sequence_length": 16,
    "steps": 9,
    "stages": [{"from_steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 32}],
}
SOURCES = {"sources": {"code": {"path": "unused", "weight": 0.4}, "web": {"path": "unused", "weight": 0.6}}}


@cache
def _planned() -> tuple[Plan, References]:
    model = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 53}
    parallel = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"}
    data = {"path": None, **SOURCES}
    config = config_of(training=BATCHES, model=model, parallel=parallel, data=data)
    plan = make_plan(config, deep=True, seed=7)
    return plan, References(plan, "fp32")


def test_each_step_of_the_configs_own_layout_is_compared() -> None:
    plan, references = _planned()
    assert plan.layouts == (OWN,), "all its micro-batches"
    verdict = Session(references, TIMEOUT_S).run(OWN)
    assert verdict.passed, explain(verdict)
    # in the first step nobody watches single gradients
    for kind, expected in (("gradient", {1, 2, 3}), ("gradient reduction", {2, 3}), ("source loss", {1, 2, 3})):
        steps = {each.quantity.step for each in verdict.deviations if each.quantity.kind == kind}
        assert steps == expected, kind


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        (defects.token_weight_of_the_batch_before, "step 2: gradients agree until then, "),
        (defects.source_losses_of_the_last_micro_batch, "the loss agrees, that of source "),
    ],
)
def test_what_a_plain_comparison_passes_is_caught(defect: Callable[[], None], said: str) -> None:
    """Only a later step of another batch is wrong, or only the loss by source."""
    _, references = _planned()
    passing = LayoutResult(OWN, "fp32", 1.0)  # smaller layouts, which are not what is tested
    session = Session(references, TIMEOUT_S, solve=partial(defects.planted, defect))
    verdict = session.run(OWN)
    assert verdict.crash is None and not verdict.passed, explain(verdict)
    diagnosis = diagnose(verdict, lambda _: passing, references.answer(OWN.accumulation), [])
    assert said in diagnosis.sentences[1], diagnosis.sentences
