"""Attention of every kind against transformers' own layers, over tensor-parallel ranks, and token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

from megalite.config import ModelConfig
from megalite.parallel import linear
from megalite.parallel.collectives import TensorParallel
from models.attention import Attention
from models.attention_masks import causal_mask
from models.key_value_cache import KeyValueCache
from tests.helpers.hub_attention import (
    LLAMA3,
    LONGROPE,
    PAIRS,
    Pair,
    attend,
    built,
    pieces_of_gradients,
    with_weights_of,
)
from tests.helpers.rank_pool import run_ranks
from tests.helpers.replicated_gradients import sum_parts

SEQ = 23
PLAIN = torch.arange(SEQ).expand(2, SEQ)
# longer and shorter than each window, and a document of one token
PACKED = torch.tensor([[*range(10), 0, *range(12)], [*range(11), *range(12)]])
# fp32, of the numbers' spread: sums in another order give 3e-6, of gradients over more terms 1e-5
NEAR, NEAR_GRADIENT = 1e-5, 3e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in standard deviations of what is expected."""
    return float((found - expected).detach().abs().max() / expected.detach().std())


def backward(output: Tensor, hidden: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(output, hidden, draw(*output.shape, seed=7).to(output.dtype), retain_graph=True)
    output.backward(draw(*output.shape, seed=7).to(output.dtype))
    return gradient


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_attention_and_its_gradients_are_transformers(pair: Pair, layer: int) -> None:
    """Plain and packed: transformers finds the documents in the positions itself, and makes its own masks."""
    oracle = pair.theirs
    ours = with_weights_of(oracle, pair.model, layer)
    for positions in (PLAIN, PACKED):
        hidden = draw(2, SEQ, pair.model.hidden_size)
        theirs_in, ours_in = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        expected = oracle(layer, theirs_in, positions)
        found = attend(ours, ours_in, None if positions is PLAIN else positions)
        assert apart(found, expected) <= NEAR
        oracle.hub.zero_grad()
        ours.zero_grad()
        assert apart(backward(found, ours_in), backward(expected, theirs_in)) <= NEAR_GRADIENT
        gradients = oracle.gradients(layer)
        for name, source, gradient in pieces_of_gradients(ours):
            # of the keys' bias all queries' scores shift alike where nothing is rotated: rounding is its gradient
            scale = float(gradients[name.replace("k_proj.bias", "q_proj.bias")].std())
            assert float((gradient - gradients[name][source]).abs().max()) <= NEAR_GRADIENT * scale, name


MISREADINGS: list[tuple[str, int, dict[str, Any]]] = [
    ("mistral", 0, {"sliding_window": 4}),
    ("mistral", 0, {"sliding_window": 6}),
    ("mistral", 0, {"layer_types": ("full_attention",) * 2}),
    ("gemma2", 1, {"attn_logit_softcapping": None}),
    ("gemma2", 1, {"query_pre_attn_scalar": None}),
    ("gemma3", 0, {"rope_local_base_freq": None}),
    ("gemma3", 0, {"normalization": "rmsnorm"}),
    ("gemma3", 1, {"rope_scaling": None}),
    ("qwen3", 0, {"rms_norm_eps": 0.1}),
    ("smollm3", 0, {"layers_without_rope": ()}),
    ("gpt-neox", 0, {"partial_rotary_factor": 0.4}),
    ("phi3", 0, {"sliding_window": 8}),
    ("gpt2", 0, {"position_embedding": "rope"}),
]


@pytest.mark.parametrize(("name", "layer", "misread"), MISREADINGS, ids=lambda value: str(value))
def test_a_misread_option_is_noticed(name: str, layer: int, misread: dict[str, Any]) -> None:
    """The comparison above sees each of them, a window off by one token and a soft cap too: far beyond rounding."""
    (pair,) = (pair for pair in PAIRS if pair.name == name)
    model = ModelConfig.model_validate(pair.model.model_dump(exclude_unset=True) | misread)
    ours, hidden = with_weights_of(pair.theirs, model, layer), draw(2, SEQ, model.hidden_size)
    with torch.no_grad():
        assert apart(attend(ours, hidden, None), pair.theirs(layer, hidden, PLAIN)) > 1000 * NEAR


@pytest.mark.parametrize("window", [1, 5, 22, 23, 24])
@pytest.mark.parametrize("explicit", [False, True], ids=["torch's attention", "all scores"])
def test_a_window_counts_the_token_itself(window: int, explicit: bool) -> None:
    """What a token does not see does not move it, what it sees does; at the sequence's own length too."""
    model = _model(sliding_window=window, attn_logit_softcapping=5.0 if explicit else None)
    attention, hidden = _drawn(model, 0, TensorParallel()), draw(1, SEQ, 44).double()
    moved = hidden.clone()
    moved[:, 0] += 1
    with torch.no_grad():
        shift = (attend(attention, moved, None) - attend(attention, hidden, None)).abs().amax((0, 2))
    assert (shift[:window] > 1e-6).all() and (shift[window:] == 0).all()


def _model(**options: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"vocab_size": 13, "hidden_size": 44, "intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 16}
    return ModelConfig.model_validate(sizes | options)


def _drawn(model: ModelConfig, layer: int, tp: TensorParallel, recompute: Any = "none") -> Attention:
    """In float64, of weights that depend on their names and global places only."""

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        return draw(*shape, seed=sum(name.encode())) * 0.4 + (0.8 if len(shape) == 1 else 0.0)

    return built(model, layer, weight, tp, recompute, torch.float64)


# everything that cuts, gathers, sums or keeps something, in few models
EVERYTHING: list[dict[str, Any]] = [
    {"attention_bias": True, "rope_scaling": LLAMA3, "num_key_value_heads": 4},
    {"query_key_norm": "per_head", "partial_rotary_factor": 0.7, "num_key_value_heads": 1},
    {"query_key_norm": "per_head", "normalization": "zero_centered_rmsnorm", "sliding_window": 5},
    {"query_key_norm": "per_head", "normalization": "layernorm", "num_key_value_heads": 4, "layers_without_rope": (0,)},
    {"query_key_norm": "full_width", "num_key_value_heads": 1, "attention_bias": True},
    {"query_key_norm": "full_width", "rope_scaling": LONGROPE, "num_key_value_heads": 8},
    {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3.0, "sliding_window": 5, "query_key_norm": "full_width"},
    {"position_embedding": "learned", "attention_bias": True, "attention_output_bias": False},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "num_key_value_heads": 1},
]


def _observed(model: ModelConfig, tp: TensorParallel, positions: Tensor | None, recompute: Any = "none") -> list[Any]:
    """Output, the input's gradient and the weights' gradients, each with its place in the whole."""
    attention = _drawn(model, 0, tp, recompute)
    hidden, direction = draw(2, 24, 44, seed=1).double(), draw(2, 24, 44, seed=2).double()
    rows = slice(tp.rank * 24 // tp.size, (tp.rank + 1) * 24 // tp.size) if tp.sequence_is_cut else slice(None)
    hidden = hidden[:, rows].clone().requires_grad_()
    output = attend(attention, hidden, positions)
    (output * direction[:, rows]).sum().backward()
    assert hidden.grad is not None
    sum_parts(attention, tp)
    place = (slice(None), rows)
    return [
        ("output", place, output.detach()),
        ("gradient of the input", place, hidden.grad),
        *((f"gradient of {name}", source, gradient) for name, source, gradient in pieces_of_gradients(attention)),
    ]


DOCUMENTS = torch.stack([torch.arange(24) % 9, torch.arange(24) % 17])


def _differences(rank: int, tp_size: int) -> list[str]:
    """What this rank sees differ from one process alone, in every model, plain and packed, sequence cut or not."""
    found = []
    for options in EVERYTHING:
        model = _model(**options)
        for positions in (None, DOCUMENTS):
            alone = {name: value for name, _, value in _observed(model, TensorParallel(), positions)}
            for sequence_parallel in (False, True):
                tp = TensorParallel(tp_size, rank, dist.group.WORLD, sequence_parallel)
                for name, place, value in _observed(model, tp, positions):
                    expected = alone[name][place]
                    if value.shape != expected.shape or not torch.allclose(value, expected, rtol=1e-10, atol=1e-10):
                        found.append(f"{name} of {options}, {sequence_parallel=}, packed={positions is not None}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [2, 4])
def test_attention_over_ranks_is_the_same(tp_size: int) -> None:
    """With 1, 2, 4 and 8 key/value heads, so more and fewer than ranks. In float64: nothing but rounding of 1e-16."""
    for rank, differences in enumerate(run_ranks(_differences, tp_size, tp_size)):
        assert not differences, f"rank {rank}: {differences}"


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_recomputation_changes_no_bit(options: dict[str, Any]) -> None:
    for positions in (None, DOCUMENTS):
        kept = _observed(_model(**options), TensorParallel(), positions)
        again = _observed(_model(**options), TensorParallel(), positions, "selective")
        assert all(torch.equal(one, other) for (*_, one), (*_, other) in zip(kept, again, strict=True))


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_a_document_is_attended_as_if_it_were_alone(options: dict[str, Any]) -> None:
    """Also where angles depend on the length: its own counts, not that of what it is packed with."""
    attention, hidden = (
        _drawn(_model(max_position_embeddings=8, **options), 0, TensorParallel()),
        draw(1, 24, 44).double(),
    )
    lengths = (5, 12, 1, 6)
    with torch.no_grad():
        packed = attend(attention, hidden, torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0))
        alone = torch.cat([attend(attention, document, None) for document in hidden.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("emulated", [False, True], ids=["bf16 units", "none"])
@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_attention_in_bf16_is_near_the_exact_one(
    options: dict[str, Any], emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same rounded weights; a bf16 number is good to 2^-9 of itself, and scores of several units are rounded."""
    monkeypatch.setattr(linear, "_cpu_multiplies_bf16", lambda: not emulated)
    rounded = _drawn(_model(**options), 0, TensorParallel()).bfloat16()
    exact, hidden = copy.deepcopy(rounded).double(), draw(2, 24, 44).bfloat16()
    for positions in (None, DOCUMENTS):
        ours_in, exact_in = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
        found, expected = attend(rounded, ours_in, positions), attend(exact, exact_in, positions)
        assert found.dtype == torch.bfloat16
        assert _distance(found, expected) <= 0.02
        assert _distance(backward(found, ours_in), backward(expected, exact_in)) <= 0.04
        for parameter, same in zip(rounded.parameters(), exact.parameters(), strict=True):
            assert parameter.grad is not None and same.grad is not None
            assert parameter.grad.dtype == torch.bfloat16 and torch.isfinite(parameter.grad).all()
            if float(same.grad.norm()) > 1e-9:  # scores do not see the bias of keys' norms where nothing is rotated
                assert _distance(parameter.grad, same.grad) <= 0.05
        rounded.zero_grad()
        exact.zero_grad()


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).detach().norm() / expected.detach().norm())


GENERATED = [pair for pair in PAIRS if pair.model_type in ("qwen3", "gemma2", "gemma3_text", "phi3", "mistral", "gpt2")]
DYNAMIC = Pair(
    "llama-dynamic",
    "llama",
    {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}, "max_position_embeddings": 9},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 9},
)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("pair", [*GENERATED, DYNAMIC], ids=str)
@torch.no_grad()
def test_token_by_token_is_as_transformers_generates(pair: Pair, layer: int) -> None:
    """A prompt, a few tokens at once, then one by one, beyond every window and length; keys stay as rotated."""
    oracle, model = pair.theirs, pair.model
    ours, their_cache = with_weights_of(oracle, model, layer), DynamicCache(config=oracle.hub.config)
    ours.cache = KeyValueCache(2, 2 if model.num_key_value_heads == 2 else 4, SEQ, model.head_dim, torch.float32, "cpu")
    hidden, start = draw(2, SEQ, model.hidden_size), 0
    for tokens in map(Tensor.contiguous, hidden.split((6, 4, *[1] * 13), dim=1)):
        stop = start + tokens.shape[1]
        positions = torch.arange(start, stop).expand(2, -1)
        expected = oracle(layer, tokens, positions, their_cache)
        assert apart(attend(ours, tokens, None), expected) <= 10 * NEAR, f"tokens {start} to {stop}"
        start = stop
    assert ours.cache.length == SEQ


def test_a_cache_says_when_it_is_full() -> None:
    cache = KeyValueCache(1, 2, 4, 6, torch.float32, "cpu")
    first, _ = cache.append(draw(1, 2, 3, 6), draw(1, 2, 3, 6))
    kept = first.clone()
    keys, values = cache.append(draw(1, 2, 1, 6, seed=1), draw(1, 2, 1, 6, seed=2))
    assert torch.equal(keys, torch.cat((kept, draw(1, 2, 1, 6, seed=1)), dim=2)) and values.shape == keys.shape
    with pytest.raises(AssertionError, match="5 tokens in a cache for 4"):
        cache.append(draw(1, 2, 1, 6), draw(1, 2, 1, 6))


def test_masks_are_made_once() -> None:
    model = _model(sliding_window=5)
    hidden = draw(1, SEQ, 44).double()
    causal_mask.cache_clear()
    with torch.inference_mode():  # what generation makes serves training
        attend(_drawn(model, 0, TensorParallel()), hidden, None)
    attend(_drawn(model, 1, TensorParallel()), hidden.requires_grad_(), None).sum().backward()
    assert causal_mask.cache_info().misses == 1 and causal_mask.cache_info().hits == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_keep_one_mask_between_them(dtype: torch.dtype) -> None:
    """Of Mistral at 8192 tokens a mask for each layer would be 4 GiB."""
    model, kept = _model(sliding_window=5), {}
    hidden = draw(1, 64, 44).to(dtype).requires_grad_()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in (0, 1):
            attend(_drawn(model, layer, TensorParallel()).to(dtype), hidden, None)
    assert sum(tensor.shape[-2:] == (64, 64) for tensor in kept.values()) == 1
