"""What the families add, under test by planted defects: each must be caught, and blamed on the axis it comes with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest

from launch.parity.layout import ParityLayout
from launch.parity.verify import References, Session
from megalite.config import ModelConfig
from models.families import model_config
from tests.helpers import defects, family_defects
from tests.helpers.hub_models import HUB_MODELS
from tests.helpers.odd_sizes import TIMEOUT_S, explain, problem, references_of

ALONE, TP, PP, SP = ParityLayout(), ParityLayout(tp=2), ParityLayout(pp=2), ParityLayout(tp=2, sequence_parallel=True)

FORWARD = "forward: the first layer whose output differs is model.layers."

# defect, name of the model, a layout that has it, the axes to blame, part of a sentence of the diagnosis
DEFECTS: list[tuple[Callable[[], None], str, ParityLayout, tuple[str, ...], str]] = [
    (family_defects.norm_of_heads_keeps_the_gradient_of_its_own, "qwen3", TP, ("tp",), "_norm.weight differs between"),
    (family_defects.norm_over_all_heads_sees_its_own, "olmo2", TP, ("tp",), FORWARD),
    (family_defects.router_keeps_the_gradient_of_its_own_part, "mixtral", TP, ("tp",), "gate.weight differs between"),
    (family_defects.router_counts_each_expert_fully, "mixtral", ALONE, (), FORWARD),
    (family_defects.router_sees_all_groups, "deepseek_v3", ALONE, (), FORWARD),
    (family_defects.scores_of_latents_are_not_scaled, "deepseek_v3-plain-queries", ALONE, (), FORWARD),
    (family_defects.halves_are_rotated_for_neighbours, "deepseek_v3-plain-queries", ALONE, (), FORWARD),
    (
        family_defects.shared_key_keeps_the_gradient_of_its_own_heads,
        "deepseek_v3-plain-queries",
        TP,
        ("tp",),
        "kv_a_proj_with_mqa.weight differs between",
    ),
    (
        family_defects.latents_keep_the_gradient_of_their_slice,
        "deepseek_v3-plain-queries",
        SP,
        ("sequence_parallel",),
        "kv_a_proj_with_mqa.weight differs between",
    ),
    (family_defects.window_is_one_token_longer, "mistral", ALONE, (), FORWARD),
    (family_defects.blocks_are_counted_from_the_first_of_their_stage, "gemma3", PP, ("pp",), FORWARD),
    (family_defects.rope_is_not_scaled, "llama-3.1", ALONE, (), FORWARD),
    (family_defects.rope_is_scaled_by_the_length_of_the_pack, "phi3-longrope", ALONE, (), FORWARD),
    (family_defects.all_layers_have_the_global_base, "gemma3", ALONE, (), FORWARD),
    (family_defects.every_layer_is_rotated, "smollm3", ALONE, (), FORWARD),
    (
        family_defects.learned_positions_restart_on_each_slice,
        "gpt2",
        SP,
        ("sequence_parallel",),
        "the first layer whose output differs is model.embed_positions",
    ),
    (
        family_defects.gradient_of_learned_positions_is_of_a_slice,
        "gpt2",
        SP,
        ("sequence_parallel",),
        "embed_positions.weight differs between",
    ),
    (family_defects.norm_is_not_centered, "gemma2", ALONE, (), FORWARD),
    (family_defects.loss_of_logits_without_their_cap, "gemma2", ALONE, (), "loss"),
    (family_defects.scores_are_not_capped, "gemma2", ALONE, (), FORWARD),
    (family_defects.feed_forward_reads_what_attention_added, "gpt_neox", ALONE, (), FORWARD),
]


@cache
def _references(name: str) -> References:
    """One problem for all defects in the same model."""
    hub_model = next(model for model in HUB_MODELS if model.name == name)
    model = ModelConfig.model_validate(model_config(hub_model.config().to_diff_dict()))
    return references_of(problem([ParityLayout()], model=model.model_dump(mode="json"), sequence=36, steps=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "name", "layout", "axes", "said"), DEFECTS, ids=[case[0].__name__ for case in DEFECTS]
)
def test_a_planted_defect_is_caught_and_its_axis_named(
    defect: Callable[[], None], name: str, layout: ParityLayout, axes: tuple[str, ...], said: str
) -> None:
    session = Session(_references(name), TIMEOUT_S, solve=partial(defects.planted, defect))
    verdict = session.run(layout)
    assert not verdict.passed, f"{defect.__name__} was not noticed on {layout}"
    assert verdict.crash is None, explain(verdict)
    (diagnosis,) = session.explain([verdict])
    assert diagnosis.axes == axes, diagnosis.sentences
    assert any(said in sentence for sentence in diagnosis.sentences), diagnosis.sentences
