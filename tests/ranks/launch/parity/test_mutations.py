"""The harness itself under test: planted defects must be caught, and blamed on the axis that they come with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from launch.parity.layout import ParityLayout
from launch.parity.observations import REDUCTION
from launch.parity.verify import References, Session
from tests.helpers import defects
from tests.helpers.odd_sizes import TIMEOUT_S, explain, problem, references_of

TIED = {"tie_word_embeddings": True}
EXPERTS = {
    "model_type": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 29,
    "intermediate_size": 29,
}

# defect, a layout that has it among innocent axes, the axes to blame, part of a sentence of the diagnosis, the model
DEFECTS: list[tuple[Callable[[], None], ParityLayout, tuple[str, ...], str, dict[str, Any]]] = [
    (
        defects.row_parallel_without_all_reduce,
        ParityLayout(tp=2, recompute="full"),
        ("tp",),
        "first layer whose output differs is model.layers.0",
        {},
    ),
    (
        defects.gradient_divided_by_accumulation,
        ParityLayout(dp=2, recompute="full", accumulation=3),
        ("accumulation",),
        "is 1/3 of the reference, which is the size of accumulation",
        {},
    ),
    (
        defects.norm_drops_shards,
        ParityLayout(tp=2, dp=2, zero=2),
        ("tp",),
        "all gradients agree, their global norm does not",
        {},
    ),
    (
        defects.tied_gradient_is_forgotten,
        ParityLayout(pp=2, recompute="selective", accumulation=3),
        ("pp",),
        "gradients of 1 parameters never came in this step, first that of model.embed_tokens.weight",
        TIED,
    ),
    (
        defects.tied_copies_go_their_own_way,
        ParityLayout(tp=2, pp=2, accumulation=3),
        ("pp",),
        "model.embed_tokens.weight",
        TIED,
    ),
    (
        defects.hand_over_is_dropped,
        ParityLayout(tp=2, pp=2, accumulation=3),
        ("pp",),
        "never came in this step, first that of model.embed_tokens.weight",
        {},
    ),
    (
        defects.gradient_is_handed_over_twice,
        ParityLayout(pp=2, recompute="full", accumulation=3, schedule="zero-bubble"),
        ("schedule",),
        "backward: the forward pass agrees",
        {},
    ),
    (
        defects.messages_are_taken_in_the_wrong_order,
        ParityLayout(pp=2, recompute="full", accumulation=3),
        ("pp", "accumulation"),
        "outputs and logits of each alone agree, the loss over several does not, nor does an evaluation's",
        {},
    ),
    (
        defects.rotation_restarts_on_each_slice,
        ParityLayout(tp=2, sequence_parallel=True, recompute="full"),
        ("sequence_parallel",),
        "first layer whose output differs is model.layers.0",
        {},
    ),
    (
        defects.last_micro_batch_is_not_reduced,
        ParityLayout(dp=2, recompute="selective", accumulation=3),
        ("dp",),
        "backward: the forward pass agrees",
        {},
    ),
    (defects.weight_decay_on_norms, ParityLayout(tp=2, dp=2), (), "one process alone fails", {}),
    (
        defects.weight_decay_on_norms_under_zero_2,
        ParityLayout(dp=2, zero=2, recompute="full"),
        ("zero",),
        "weight does not, most of all that of model.layers.",
        {},
    ),
    (
        defects.stale_key_value_head,
        ParityLayout(tp=4, recompute="selective"),
        ("tp",),
        "backward: the forward pass agrees",
        {"num_key_value_heads": 1},
    ),
    (
        defects.attention_head_of_a_neighbour,
        ParityLayout(tp=4, dp=2),
        ("tp",),
        "first layer whose output differs is model.layers.0",
        {},
    ),
    (
        defects.norm_gradients_of_a_slice,
        ParityLayout(tp=2, pp=2, sequence_parallel=True),
        ("sequence_parallel",),
        "layernorm.weight differs between ranks",
        {},
    ),
    (
        defects.norm_gradients_are_summed_twice,
        ParityLayout(tp=2, pp=2, sequence_parallel=True, accumulation=3),
        ("sequence_parallel",),
        "backward: the forward pass agrees",
        {},
    ),
    (defects.schedule_is_ignored, ParityLayout(dp=2, zero=2), (), "update: gradients and their norm agree", {}),
    (
        defects.first_bucket_is_not_reduced,
        ParityLayout(tp=2, dp=2, zero=2),
        ("dp",),
        "reduction: the optimizer does not get the mean",
        {},
    ),
    (
        defects.norm_of_the_first_partition,
        ParityLayout(dp=2, accumulation=3),
        ("dp",),
        "all gradients agree, their global norm does not",
        {},
    ),
    (
        defects.recomputation_cuts_the_graph,
        ParityLayout(dp=2, zero=2, recompute="full"),
        ("recompute",),
        "never came in this step, first that of model.embed_tokens.weight",
        {},
    ),
    (
        defects.zero_3_computes_with_stale_weights,
        ParityLayout(tp=2, dp=2, zero=3),
        ("zero",),
        "first layer whose output differs",
        {},
    ),
    (
        defects.earlier_stages_divide_by_accumulation,
        ParityLayout(tp=2, pp=2, accumulation=3),
        ("pp", "accumulation"),
        "is 1/3 of the reference, which is the size of accumulation",
        {},
    ),
    (
        defects.chunks_of_neighbours_are_exchanged,
        ParityLayout(dp=2, cp=2, cp_kind="all_gather"),
        ("cp",),
        "first layer whose output differs is model.layers.0",
        {},
    ),
    (
        defects.positions_begin_on_each_rank,
        ParityLayout(pp=2, cp=2, accumulation=2),
        ("cp",),
        "first layer whose output differs is model.layers.0",
        {},
    ),
    (
        defects.each_part_of_a_sequence_has_a_weight,
        ParityLayout(cp=2, zero=2, cp_kind="ulysses"),
        ("cp",),
        "is 1/2 of the reference, which is the size of cp",
        {},
    ),
    (
        defects.key_gradients_are_not_reduced,
        ParityLayout(tp=2, cp=2, cp_kind="all_gather", recompute="full"),
        ("cp",),
        "backward: the forward pass agrees",
        {},
    ),
    (
        defects.tokens_come_back_to_a_neighbour,
        ParityLayout(pp=2, dp=2, ep=2, accumulation=2),
        ("ep",),
        "first layer whose output differs is model.layers.0",
        EXPERTS,
    ),
    (
        defects.an_expert_has_a_row_of_its_neighbour,
        ParityLayout(cp=2, ep=2, recompute="full"),
        ("ep",),
        "first layer whose output differs is model.layers.",
        EXPERTS,
    ),
    (
        defects.experts_are_summed_over_all_replicas,
        ParityLayout(dp=2, ep=2, zero=2, recompute="selective"),
        ("ep",),
        "reduction: the optimizer does not get the mean",
        EXPERTS,
    ),
    (
        defects.norm_counts_experts_once_for_each_rank,
        ParityLayout(tp=2, dp=2, ep=2, accumulation=3),
        ("ep",),
        "all gradients agree, their global norm does not",
        EXPERTS,
    ),
]


LAYOUTS = [layout for _, layout, *_ in DEFECTS]


@cache
def _references(model: tuple[tuple[str, Any], ...], sequence: int) -> References:
    """One problem for all defects in the same model."""
    return references_of(problem(LAYOUTS, model={"num_hidden_layers": 2} | dict(model), sequence=sequence))


def _session(
    layout: ParityLayout, defect: Callable[[], None], model: dict[str, Any], timeout_s: float = TIMEOUT_S
) -> Session:
    references = _references(tuple(model.items()), 36 if layout.sequence_parallel or layout.cp > 1 else 33)
    return Session(references, timeout_s, solve=partial(defects.planted, defect))


def _marks(index: int) -> list[pytest.MarkDecorator]:
    """The default run takes the first defect that is blamed on each axis."""
    axes = [case[2] for case in DEFECTS]
    return [pytest.mark.exhaustive] if axes[index] in axes[:index] else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "layout", "axes", "said", "model"),
    [pytest.param(*case, marks=_marks(index), id=case[0].__name__) for index, case in enumerate(DEFECTS)],
)
def test_a_planted_defect_is_caught_and_its_axis_named(
    defect: Callable[[], None], layout: ParityLayout, axes: tuple[str, ...], said: str, model: dict[str, Any]
) -> None:
    session = _session(layout, defect, model)
    verdict = session.run(layout)
    assert not verdict.passed, f"{defect.__name__} was not noticed on {layout}"
    assert verdict.crash is None or "never came" in said, explain(verdict)
    (diagnosis,) = session.explain([verdict])
    assert diagnosis.axes == axes, diagnosis.sentences
    assert any(said in sentence for sentence in diagnosis.sentences), diagnosis.sentences


@pytest.mark.slow
def test_gradients_that_replicas_sum_in_bf16_are_a_defect_of_the_reduction() -> None:
    """Nothing else differs by more than bf16 itself; on one process nothing is summed over replicas."""
    layout = ParityLayout(dp=2, zero=2)
    asked = problem([layout], model={"num_hidden_layers": 2}, precision={"dtype": "bf16"})
    defect = partial(defects.planted, defects.gradients_are_summed_in_16_bits)
    session = Session(references_of(asked, "bf16"), TIMEOUT_S, solve=defect)
    verdict = session.run(layout)
    assert {failure.quantity.kind for failure in verdict.failures} == {REDUCTION}, explain(verdict)
    (diagnosis,) = session.explain([verdict])
    assert diagnosis.axes == ("dp",), diagnosis.sentences
    said = next(sentence for sentence in diagnosis.sentences if sentence.startswith("reduction: "))
    assert said.endswith("and a sum in 16 bits the rest"), said
    assert session.run(ParityLayout(accumulation=3)).passed and not session.run(ParityLayout(dp=3)).passed


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_a_failure_with_an_axis() -> None:
    layout = ParityLayout(tp=2)
    session = _session(layout, defects.one_rank_skips_an_all_reduce, {}, timeout_s=8.0)
    verdict = session.run(layout)
    session.timeout_s = TIMEOUT_S  # of layouts that do end
    assert verdict.crash is not None and not verdict.passed
    (diagnosis,) = session.explain([verdict])
    assert diagnosis.axes == ("tp",), diagnosis.sentences
