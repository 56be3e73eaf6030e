"""Models, precisions and settings that the sample of layouts does not vary, where stacks like ours have gone wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from launch.parity.layout import ParityLayout
from launch.parity.observations import Quantity
from launch.parity.problem import Dtype, ParityProblem
from launch.parity.verify import References, Session
from tests.helpers.odd_sizes import TIMEOUT_S, explain, problem, references_of

BIASES = {"attention_bias": True, "mlp_bias": True}
STARCODER2 = {
    "model_type": "starcoder2",
    "normalization": "layernorm",
    "gated_mlp": False,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
} | BIASES
TIED = {"tie_word_embeddings": True}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
EVERYTHING = ParityLayout(tp=2, pp=2, dp=2, recompute="selective", accumulation=3)
FOUR_RANKS = ParityLayout(tp=2, pp=2, recompute="selective", accumulation=3)


def check(references: References, *layouts: ParityLayout) -> None:
    session = Session(references, TIMEOUT_S)
    for verdict in map(session.run, layouts):
        assert verdict.passed, explain(verdict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (SIX_HEADS, [ParityLayout(tp=3, dp=2, zero=3)]),
        (
            {"num_key_value_heads": 1} | BIASES,
            [ParityLayout(tp=4, sequence_parallel=True), ParityLayout(pp=3, accumulation=3)],
        ),
        # a vocabulary so small that a rank holds nothing but padding
        ({"vocab_size": 5} | TIED, [ParityLayout(tp=4, pp=2), ParityLayout(tp=4, dp=2, zero=2)]),
        # LayerNorm, biases everywhere, a plain GELU
        pytest.param(
            STARCODER2,
            [FOUR_RANKS, ParityLayout(tp=2, dp=2, zero=3, sequence_parallel=True, recompute="full")],
            marks=pytest.mark.exhaustive,  # tests/ranks/models/test_family_layouts.py has each kind of block
        ),
    ],
    ids=["six heads", "one kv head, biases", "five tokens", "starcoder2"],
)
def test_models(model: dict[str, Any], layouts: list[ParityLayout]) -> None:
    sequence = 36 if any(layout.sequence_parallel for layout in layouts) else 33
    check(references_of(problem(layouts, model=model, sequence=sequence)), *layouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip", [0.0, pytest.param(100.0, marks=pytest.mark.exhaustive)], ids=["off", "too high to bite"]
)
def test_gradients_that_are_not_clipped(clip: float) -> None:
    layouts = [ParityLayout(tp=2, dp=2, zero=2), ParityLayout(pp=4)]
    check(references_of(problem(layouts, training={"gradient_clipping": clip})), *layouts)


def gradient_share(references: References, names: str) -> float:
    """Part of the squared gradient norm that parameters with this in their names make up."""
    truth = references.answer(1).truth[Quantity("sgd-under-clip", "gradient")]
    squares = {name: float(np.square(gradient).sum()) for name, gradient in truth.items()}
    return sum(square for name, square in squares.items() if names in name) / sum(squares.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "scales"),
    [
        # small weights in the norms shrink every other gradient, not their own
        ("norm", {"norm.weight": 0.02}),
        # a large last norm makes the head's gradient large; blocks that do next to nothing have next to none
        (
            "embed_tokens",
            {
                "model.norm.weight": 12.0,
                "o_proj.weight": 0.01,
                "down_proj.weight": 0.01,
                "input_layernorm.weight": 0.1,
                "post_attention_layernorm.weight": 0.1,
            },
        ),
    ],
    ids=["replicated norms", "tied embedding"],
)
def test_clipping_by_a_norm_that_one_kind_of_parameter_dominates(names: str, scales: dict[str, float]) -> None:
    """Where DeepSpeed counts a parameter twice, or drops its shards, nothing else hides it."""
    layouts = [
        ParityLayout(tp=2, dp=2, zero=2),
        ParityLayout(tp=2, pp=2, sequence_parallel=True),
        ParityLayout(pp=2, dp=2),
    ]
    dominated = dataclasses.replace(problem(layouts, model=TIED, sequence=36), scales=scales)
    references = references_of(dominated)
    assert gradient_share(references, names) > 0.9
    check(references, *layouts)


def test_the_clip_bites_at_some_steps_and_not_at_others() -> None:
    references = references_of(problem([ParityLayout()]))
    clip = references.trainings[1].config.training.gradient_clipping
    norms = references.answer(1).truth[Quantity("sgd-under-clip", "gradient norm")]
    bites = [float(norm[0]) > clip for norm in norms.values()]
    assert True in bites and False in bites, (clip, norms)


@pytest.mark.slow
def test_tied_copies_stay_equal_to_the_bit() -> None:
    """At this size they did not: a rounding per step, and the self-check of a run would have stopped it."""
    layouts = [ParityLayout(pp=2, dp=3), ParityLayout(tp=2, pp=2, dp=2)]
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 2048}
    check(references_of(problem(layouts, model=TIED | sizes)), *layouts)
    check(references_of(problem(layouts, model=TIED | sizes, precision={"dtype": "bf16"}), "bf16"), layouts[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [FOUR_RANKS, EVERYTHING], ids=str)
def test_ten_steps(layout: ParityLayout) -> None:
    longer = dataclasses.replace(problem([layout]), steps=10)
    check(references_of(longer), layout)


HALF = [
    ParityLayout(tp=2),
    ParityLayout(dp=3, zero=2, accumulation=2),
    ParityLayout(dp=2, zero=3),
    ParityLayout(tp=2, pp=2, sequence_parallel=True, recompute="selective", accumulation=3),
]


def half(accumulation_dtype: str, dtype: Dtype) -> ParityProblem:
    precision = {"dtype": dtype, "gradient_accumulation_dtype": accumulation_dtype}
    return problem(HALF, model=TIED, sequence=36, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation_dtype", "layouts"),
    [
        ("fp32", HALF[2:]),
        ("16 bits", HALF[:2]),
        pytest.param("fp32", HALF[:2], marks=pytest.mark.exhaustive),
        pytest.param("16 bits", HALF[2:], marks=pytest.mark.exhaustive),
    ],
    ids=["fp32", "16 bits", "fp32, other layouts", "16 bits, other layouts"],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_are_as_near_to_float64_as_transformers(
    dtype: Dtype, accumulation_dtype: str, layouts: list[ParityLayout]
) -> None:
    sums = dtype if accumulation_dtype == "16 bits" else accumulation_dtype
    check(references_of(half(sums, dtype), dtype), *layouts)


@pytest.mark.slow
def test_our_serial_model_as_the_reference() -> None:
    layouts = [ParityLayout(tp=2, pp=2), ParityLayout(dp=2, zero=3)]
    check(references_of(problem(layouts), reference="self"), *layouts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [31, 36, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (32, 33, 35))])
def test_a_bias_whose_gradient_is_rounding_fails_nobody_in_bf16(seed: int) -> None:
    """A key's bias moves all scores of a query alike; at these seeds it once failed, on one process."""
    asked = problem(
        [ParityLayout()], model={"num_hidden_layers": 2, "attention_bias": True}, precision={"dtype": "bf16"}
    )
    check(references_of(dataclasses.replace(asked, seed=seed, steps=1), "bf16"), ParityLayout())


DROPOUT = {"attention_dropout": 0.2, "residual_dropout": 0.1, "embedding_dropout": 0.15}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        [
            ParityLayout(dp=3, zero=3, recompute="full"),
            ParityLayout(tp=2, pp=2, dp=2, recompute="selective", accumulation=2),
        ],
        pytest.param(
            [
                ParityLayout(dp=2, zero=2, accumulation=3),
                ParityLayout(tp=2, sequence_parallel=True, recompute="full"),
                ParityLayout(tp=4, recompute="selective"),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["all axes", "each axis"],
)
def test_dropout_is_the_same_on_every_layout(layouts: list[ParityLayout]) -> None:
    """One mask that differs, on one rank, at one step or in a recomputation, is an error a thousand times the bound."""
    asked = problem(layouts, model=DROPOUT, sequence=36, keep_dropout=True)
    references = references_of(asked, reference="self")
    dropped, whole = references.answer(1).truth, references_of(problem(layouts, sequence=36)).answer(1).truth
    loss = Quantity("adamw", "loss")
    assert all(abs(dropped[loss][step] / whole[loss][step] - 1) > 1e-3 for step in whole[loss])
    check(references, *layouts)


def test_two_independent_models_are_one_function_in_float64() -> None:
    """Ours and transformers', on losses, gradients, weights and moments: what is left is float64's own rounding."""
    for model in ({}, TIED | BIASES, STARCODER2):
        asked = problem([ParityLayout()], model=model)
        ours, theirs = (references_of(asked, reference=name).answer(1).truth for name in ("self", "transformers"))
        assert ours.keys() == theirs.keys()
        for quantity, arrays in theirs.items():
            for name, value in arrays.items():
                scale = np.abs(value).max()
                if quantity.kind == "gradient" and name.endswith("k_proj.bias"):
                    scale = np.abs(arrays[name.replace("k_proj", "q_proj")]).max()  # its own is zero but for rounding
                difference = np.abs(ours[quantity][name] - value).max()
                assert difference <= 1e-9 * scale, f"{model}: {quantity} of {name} off by {difference / scale:.1e}"
