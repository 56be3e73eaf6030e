"""What is asked of every layout: small, fresh, and nasty where a mean of means or a default would hide a mistake."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from launch.errors import LaunchError
from launch.parity.layout import ParityLayout
from launch.parity.problem import make_problem
from launch.parity.verify import make_plan
from megalite.config import Config
from megalite.config.batch_stages import shapes_of
from tests.helpers.odd_sizes import MODEL, config_of, problem

BIG = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def made(config: Config, *layouts: ParityLayout, full: bool = False) -> Config:
    return make_problem(config, layouts, seed=1, steps=3, full=full).config


def test_a_large_model_gets_small_and_keeps_its_switches_and_proportions() -> None:
    config = config_of(sequence=8192, model=BIG, optimizer={"eps": 1e-8})
    small = make_problem(config, [ParityLayout(tp=4)], seed=1, steps=3, full=False)
    model = small.config.model
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (16, 4, 16)
    assert model.hidden_size == model.num_attention_heads * model.head_dim == 256
    assert model.intermediate_size == 14336 * model.hidden_size // 4096
    assert (model.rope_theta, model.tie_word_embeddings) == (500_000.0, True)
    assert model.vocab_size % 2 == 1 and model.num_hidden_layers == 5
    assert small.config.training.sequence_length == 96
    said = " ".join(small.changes)
    for change in ("num_hidden_layers 32 -> 5", "sequence_length 8192 -> 96", "vocab_size 128256 -> 2039", "eps 1e-08"):
        assert change in said


def test_full_changes_no_size() -> None:
    config = config_of(sequence=640, model=BIG)
    whole = made(config, ParityLayout(), full=True)
    assert whole.model.model_copy(update={"initializer_range": 0.02}) == config.model
    assert whole.training.sequence_length == 640


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "hidden", "layouts"),
    [
        (28, 4, 128, 3584, [ParityLayout(tp=2), ParityLayout(tp=4)]),  # Qwen2-7B
        (14, 2, 64, 896, [ParityLayout(tp=2)]),
        (9, 3, 64, 576, [ParityLayout(tp=3)]),  # SmolLM-135M
        (64, 8, 128, 8192, [ParityLayout(tp=8), ParityLayout(pp=8)]),  # Llama-3-70B
        (32, 32, 128, 4096, [ParityLayout(tp=2), ParityLayout(tp=4)]),
        (16, 16, 256, 3072, [ParityLayout(tp=4)]),  # Gemma-7B: heads wider than the model
        (128, 128, 128, 64, [ParityLayout(tp=2)]),
        (64, 1, 64, 96, [ParityLayout(tp=4)]),
    ],
)
def test_a_small_model_is_cut_as_the_large_one(
    heads: int, kv_heads: int, head_dim: int, hidden: int, layouts: list[ParityLayout]
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": hidden}
    small = made(config_of(model=BIG | sizes), *layouts)
    model = small.model
    assert model.num_attention_heads // model.num_key_value_heads == heads // kv_heads
    assert model.num_attention_heads * model.head_dim <= 512 and 32 <= model.hidden_size <= 256
    for layout in layouts:
        assert (model.num_key_value_heads % layout.tp == 0) == (kv_heads % layout.tp == 0), "another code path"
        layout.config(small)  # raises where it cannot be


def test_learning_rates_that_nothing_could_be_seen_at_are_changed_and_said() -> None:
    for rate, wanted in ((1e-8, 1e-4), (1e-3, 1e-3), (0.5, 3e-3)):
        asked = make_problem(
            config_of(optimizer={"learning_rate": rate}), [ParityLayout()], seed=1, steps=3, full=False
        )
        assert asked.config.optimizer.learning_rate == wanted
        assert any("learning_rate" in change for change in asked.changes) == (rate != wanted)
    rates = [asked.training().learning_rate(step) for step in range(3)]
    assert len(set(rates)) == 3, "a schedule that is not followed must show"


def test_every_layout_reduces_in_the_buckets_that_the_config_states_or_in_many() -> None:
    layout = ParityLayout(dp=2, zero=2)
    for stated, wanted in (({"gradient_bucket_size": 7}, 7), ({}, MODEL["hidden_size"] * MODEL["intermediate_size"])):
        asked = make_problem(config_of(parallel=stated), [layout], seed=1, steps=3, full=False)
        for training in (asked.training(), asked.sgd(0.1, 1.0)):
            assert layout.config(training.config).parallel.gradient_bucket_size == wanted


def test_what_cannot_be_verified_is_one_sentence() -> None:
    with pytest.raises(LaunchError, match="vocab_size 1 has nothing to verify"):
        problem([ParityLayout()], model={"vocab_size": 1})
    with pytest.raises(LaunchError, match="only a global batch of 3080 sequences"):
        problem([ParityLayout(dp=7), ParityLayout(dp=5), ParityLayout(dp=8, accumulation=11)])


def test_a_sequence_is_never_longer_than_the_model_allows() -> None:
    config = config_of(sequence=2, model={"max_position_embeddings": 2})
    assert made(config, ParityLayout(), ParityLayout(tp=4, sequence_parallel=True)).training.sequence_length == 2


def test_a_small_model_stays_as_it_is() -> None:
    config = config_of()
    assert made(config, ParityLayout()).model.model_copy(update={"initializer_range": 0.02}) == config.model


def test_one_batch_and_one_length_serve_all_layouts() -> None:
    training = made(
        config_of(), ParityLayout(dp=5), ParityLayout(dp=2, accumulation=4), ParityLayout(tp=4, sequence_parallel=True)
    ).training
    assert training.global_batch_size == 40 and training.sequence_length == 32


def test_the_sizes_of_validation_sets_are_not_those_of_the_batch_compared() -> None:
    """5 samples, which the run's own micro-batch of 1 divides, were refused for that of 12."""
    values = config_of().model_dump(mode="json")
    values["data"] |= {"validation": {"own": {"path": "data/own", "samples": 5}}}
    assert made(Config.model_validate(values), ParityLayout(dp=3)).data.validation == {}


def test_batches_have_documents_unequal_losses_and_replicas_without_any() -> None:
    asked = problem([ParityLayout(dp=2, accumulation=3)])
    packed, whole = asked.training(), asked.sgd(0.1, 1.0)
    for training in (packed, whole):
        valid = [(batch.targets != -100).sum(axis=1) for batch in training.batches]
        assert len(set(valid[0].tolist())) > 3
        assert valid[-1][: len(valid[-1]) // 2].sum() == 0 < valid[-1].sum()
    positions = packed.batches[0].positions
    assert positions is not None and (positions[:, 0] == 0).all()
    assert ((positions == 0).sum(axis=1) > 1).any()
    assert whole.batches[0].positions is None
    dense, sparse = ((batch.targets != -100).mean() for batch in whole.batches[:2])
    assert sparse < dense / 5


def test_a_seed_repeats_a_problem_and_another_draws_another() -> None:
    first, again = (problem([ParityLayout()]).training().batches[0].tokens for _ in range(2))
    other = dataclasses.replace(problem([ParityLayout()]), seed=8).training().batches[0].tokens
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_norms_and_biases_start_away_from_ones_and_zeros() -> None:
    asked, where = problem([ParityLayout()]), (slice(4, 12),)
    norm = asked.initial_value("model.norm.weight", np.ones(8, np.float32), where, (48,))
    bias = asked.initial_value("a.bias", np.zeros(8, np.float32), where, (48,))
    assert np.abs(norm - 1).min() > 0 and np.abs(norm - 1).max() < 0.5
    assert np.abs(bias).min() > 0
    whole = asked.initial_value("a.bias", np.zeros(48, np.float32), (slice(0, 48),), (48,))
    assert np.array_equal(whole[4:12], bias), "a rank's slice starts like the whole"


def test_dropout_is_off_where_the_reference_draws_other_masks() -> None:
    config = config_of(model={"attention_dropout": 0.1})
    off = make_problem(config, [ParityLayout()], seed=1, steps=3, full=False)
    on = make_problem(config, [ParityLayout()], seed=1, steps=3, full=False, keep_dropout=True)
    assert (off.config.model.attention_dropout, on.config.model.attention_dropout) == (0.0, 0.1)
    assert any("attention_dropout 0.1 -> 0" in change for change in off.changes)


def test_balance_of_experts_is_left_out_and_said() -> None:
    experts = {"num_experts": 4, "moe_intermediate_size": 20}
    config = config_of(model=experts, training={"router": {"z_loss": 0.1, "bias_rate": 0.01}})
    asked = make_problem(config, [ParityLayout()], seed=1, steps=3, full=False)
    assert not any(value for _, value in asked.config.training.router)
    assert "training.router.z_loss 0.1 -> 0, because transformers has no such loss" in asked.changes
    assert "training.router.bias_rate 0.01 -> 0, because transformers has no such bias" in asked.changes


def test_a_deep_problem_has_the_batches_and_mixes_of_all_stages() -> None:
    """In each step the config's own number of micro-batches, which a plain problem cuts to four; sequences of all
    lengths, in the proportions of the run; and no sample of a source that has no weight in a stage."""
    stages = [{"from_steps": 3, "global_batch_size": 96, "sequence_length": 96, "micro_batch_size": 4}]
    stages += [{"from_tokens": 900_000, "global_batch_size": 144, "micro_batch_size": 1}]
    batch = {"global_batch_size": 48, "micro_batch_size": 3, "sequence_length": 32, "steps": 99, "stages": stages}
    mix = {"b": {"path": "x", "weight": 1}, "a": {"path": "x", "weight": 0}}
    weights = ({"a": 1, "b": 0}, {"a": 1}, {"b": 0.5})
    changes = [{"from_steps": step, "weights": each} for step, each in enumerate(weights, start=1)]
    data = {"path": None, "sources": mix, "stages": changes}
    config = config_of(training=batch, data=data, parallel={"data_parallel_size": 2})
    plan = make_plan(config, deep=True, seed=1)
    own = ParityLayout(dp=2, accumulation=8)
    assert plan.layouts == (own,) and plan.problem.steps == 4
    assert "steps 3 -> 4" in " ".join(plan.problem.changes)
    training = plan.problem.training()
    assert [each.tokens.shape for each in training.batches] == [(48, 32), (24, 96), (144, 96), (144, 96)]
    assert [training.micro_batches(8, step) for step in range(4)] == [8, 12, 72, 72]
    assert [training.micro_batches(1, step) for step in range(4)] == [1, 1, 1, 1], "accumulation is off in all steps"
    for layout, micro_batches in ((own, [8, 12, 72]), (own.without("dp"), [8, 12, 72]), (ParityLayout(), [1, 1, 1])):
        shapes = shapes_of(layout.config(training.config).training)
        assert [shape.micro_batches(layout.dp) for shape in shapes] == micro_batches, layout
    drawn = [set(each.sources) for each in training.batches if each.sources is not None]
    assert drawn == [{1}, {0}, {0, 1}, {1}], "places by name"
    with pytest.raises(
        LaunchError, match=r"--deep, whose layout is the config's own: dp=16.* needs 16 ranks, and 8 fit"
    ):
        make_plan(config_of(training={"global_batch_size": 16}, parallel={"data_parallel_size": 16}), deep=True)
