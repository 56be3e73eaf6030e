"""Angles of every scaling against transformers' rotary embeddings, to the bit, and where lengths differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from megalite.config import ModelConfig
from megalite.config.model import RopeScaling
from models.rope import Rope, attention_factor, document_lengths, fixed_rotation, rope_of_layer, rotation

CPU, FP32 = torch.device("cpu"), torch.float32
FACTORS = st.floats(1.0, 40.0)


@pytest.fixture(autouse=True, scope="module")
def without_advice() -> Iterator[None]:
    """transformers has some about factors that no real model has."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def scalings(pairs: int) -> st.SearchStrategy[dict[str, Any]]:
    divisors = st.lists(st.floats(1.0, 60.0), min_size=pairs, max_size=pairs)
    original = {"original_max_position_embeddings": st.sampled_from([7, 64, 4096])}
    kinds: dict[str, dict[str, Any]] = {
        "linear": {"factor": FACTORS},
        "dynamic": {"factor": FACTORS},
        "llama3": original
        | {"factor": FACTORS, "low_freq_factor": st.floats(0.5, 2.0), "high_freq_factor": st.floats(2.1, 8.0)},
        "yarn": original
        | {
            "factor": FACTORS,
            "attention_factor": optional(st.floats(0.5, 2.0)),
            "beta_fast": optional(st.floats(8.0, 64.0)),
            "beta_slow": optional(st.floats(0.5, 4.0)),
            "mscale": optional(st.floats(0.1, 2.0)),
            "mscale_all_dim": optional(st.floats(0.1, 2.0)),
            "truncate": optional(st.booleans()),
        },
        "longrope": original
        | {
            "factor": optional(FACTORS),
            "attention_factor": optional(st.floats(0.5, 2.0)),
            "short_factor": divisors,
            "long_factor": divisors,
        },
    }
    return st.one_of(
        st.fixed_dictionaries({"rope_type": st.just(kind), **values}).map(
            lambda drawn: {key: value for key, value in drawn.items() if value is not None}
        )
        for kind, values in kinds.items()
    )


@st.composite
def ropes(draw: Any) -> tuple[Rope, Any]:
    """Ours, and the config of transformers that says the same."""
    head_dim, part = draw(st.sampled_from([(8, 1.0), (8, 0.5), (20, 0.9), (20, 0.4), (64, 1.0), (96, 0.75)]))
    dim = int(head_dim * part)  # even; transformers has YaRN for no other
    scaling = draw(scalings(dim // 2))
    base, longest = draw(st.sampled_from([1e3, 1e4, 5e5])), draw(st.sampled_from([9, 64, 8192]))
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2,
        head_dim=head_dim,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters={**scaling, "rope_theta": base, "partial_rotary_factor": part},
    )
    return Rope(dim, base, longest, RopeScaling.model_validate(scaling)), config


@given(drawn=ropes(), length=st.sampled_from([1, 6, 7, 8, 9, 10, 64, 65, 300, 4097, 9000]))
@settings(max_examples=120, deadline=None)
def test_angles_are_transformers(drawn: tuple[Rope, Any], length: int) -> None:
    """To the bit: the last bit of a frequency moves the angle of position 9000 by as much as its 1e-3."""
    rope, config = drawn
    positions = torch.arange(length).unsqueeze(0)
    expected = Phi3RotaryEmbedding(config)(torch.zeros(1), positions)
    found = fixed_rotation(length, rope, CPU, FP32)
    for ours, theirs in zip(found, expected, strict=True):
        pairs = ours.shape[-1]
        assert torch.equal(ours.squeeze(2), theirs[..., :pairs]) and torch.equal(ours.squeeze(2), theirs[..., pairs:])
    _, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, CPU)
    assert math.isclose(attention_factor(rope), factor, rel_tol=1e-15)


@pytest.mark.parametrize("part", [1.0, 0.5, 0.25])  # 20 * 0.25 is odd: three pairs
def test_plain_angles_are_transformers(part: float) -> None:
    model = _model(partial_rotary_factor=part, rope_theta=2e6)
    config = transformers.Phi3Config(
        hidden_size=40, num_attention_heads=2, rope_parameters={"rope_theta": 2e6, "partial_rotary_factor": part}
    )
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.bfloat16), torch.arange(5, 105).unsqueeze(0))
    rope = rope_of_layer(model, 0)
    assert rope is not None
    ours = fixed_rotation(100, rope, CPU, torch.bfloat16, 5)
    assert torch.equal(ours[0].squeeze(2), cos[..., : cos.shape[-1] // 2])
    assert torch.equal(ours[1].squeeze(2), sin[..., : sin.shape[-1] // 2])


def _model(**options: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"vocab_size": 5, "hidden_size": 40, "intermediate_size": 3, "num_hidden_layers": 3}
    return ModelConfig.model_validate(sizes | {"num_attention_heads": 2} | options)


def test_layers_rotate_as_their_kind_says() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    linear = {"rope_type": "linear", "factor": 8.0}
    model = _model(
        rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=linear, sliding_window=3, layer_types=tuple(kinds)
    )
    config = transformers.Gemma3TextConfig(
        hidden_size=40,
        num_attention_heads=2,
        head_dim=20,
        num_hidden_layers=3,
        layer_types=kinds,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": linear | {"rope_theta": 1e6},
        },
    )
    theirs, positions = Gemma3RotaryEmbedding(config), torch.arange(50).unsqueeze(0)
    for layer, kind in enumerate(kinds):
        rope = rope_of_layer(model, layer)
        assert rope is not None
        cos, _ = rotation(positions, rope, FP32)
        assert torch.equal(cos.squeeze(2), theirs(torch.zeros(1), positions, kind)[0][..., :10])

    nowhere = _model(position_embedding="learned")
    some = _model(layers_without_rope=(0, 2))
    assert [rope_of_layer(nowhere, layer) for layer in range(3)] == [None] * 3
    assert [rope_of_layer(some, layer) is None for layer in range(3)] == [True, False, True]


@given(rows=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_document_counts_its_own_tokens(rows: list[list[int]]) -> None:
    seq = max(map(sum, rows))
    rows = [[*row, *[1] * (seq - sum(row))] for row in rows]
    expected = torch.tensor([[length for length in row for _ in range(length)] for row in rows])
    assert torch.equal(document_lengths(_packed(rows)), expected)


def _packed(rows: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 3.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [1.0, 3.0, 9.0],
            "original_max_position_embeddings": 8,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_documents_are_rotated_as_if_alone(scaling: dict[str, Any]) -> None:
    """Shorter, as long as and longer than the original length, in one micro-batch; transformers takes the longest."""
    rope, rows = Rope(6, 1e4, 8, RopeScaling.model_validate(scaling)), [[5, 9, 8], [20, 2]]
    packed = rotation(_packed(rows), rope, FP32)
    for found, part in zip(packed, (0, 1), strict=True):
        for row, lengths in zip(found, rows, strict=True):
            alone = torch.cat([fixed_rotation(length, rope, CPU, FP32)[part][0] for length in lengths])
            assert torch.equal(row, alone)
    whole = fixed_rotation(9, rope, CPU, FP32)[0][:, :5]
    assert not torch.equal(whole, fixed_rotation(5, rope, CPU, FP32)[0])  # the length matters
