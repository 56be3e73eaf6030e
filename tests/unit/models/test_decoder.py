from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel, make_layer
from megalite.parallel.loss import head_loss
from models.attention import rotated
from models.attention_masks import document_mask
from models.decoder import decoder_layers
from models.feed_forward import gated
from tests.helpers.sizes import ODD_SIZES

MODEL = ModelConfig(**ODD_SIZES, num_key_value_heads=2, initializer_range=0.1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' `x * cos + rotate_half(x) * sin`."""
    first, second = x.chunk(2, dim=-1)
    return x * torch.cat((cos, cos), -1) + torch.cat((-second, first), -1) * torch.cat((sin, sin), -1)


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("batch_of_angles", [1, 2], ids=["fixed positions", "positions per sequence"])
@pytest.mark.parametrize("sizes", [(6, 2, 2), (6, 2)], ids=["one buffer", "queries and keys"])
def test_rotation_and_its_gradient_are_the_plain_formulas(sizes: tuple[int, ...], batch_of_angles: int) -> None:
    x, angle = draw(2, 3, sum(sizes), 9).requires_grad_(), draw(batch_of_angles, 3, 1, 4, seed=1)

    def turn(x: Tensor) -> tuple[Tensor, ...]:
        parts = (x,) if len(sizes) == 3 else x.split(sizes, dim=2)
        return rotated(partial, sizes, angle.cos(), angle.sin(), *parts)

    for turned, plain in zip(turn(x)[:2], x.split(sizes, dim=2), strict=False):
        expected = plain_rotation(plain[..., :8], angle.cos(), angle.sin())
        torch.testing.assert_close(turned[..., :8], expected, atol=1e-14, rtol=0)
        assert torch.equal(turned[..., 8:], plain[..., 8:])
    assert torch.equal(torch.cat((x[:, :, :8], *turn(x)[2:]), dim=2), x)
    assert torch.autograd.gradcheck(turn, (x,))


def test_swiglu_and_its_gradient_are_the_plain_formulas() -> None:
    x = (3 * draw(2, 5, 14)).requires_grad_()
    torch.testing.assert_close(gated("silu")(x), plain_swiglu(x), atol=1e-14, rtol=0)
    assert torch.autograd.gradcheck(gated("silu"), (x,))


@given(lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3))
def test_document_mask_is_causal_inside_each_document(lengths: list[list[int]]) -> None:
    seq = max(sum(row) for row in lengths)
    positions = torch.zeros(len(lengths), seq, dtype=torch.long)
    expected = np.zeros((len(lengths), 1, seq, seq), dtype=bool)
    for row, documents in enumerate(lengths):
        start = 0
        for length in [*documents, *[1] * (seq - sum(documents))]:
            positions[row, start : start + length] = torch.arange(length)
            expected[row, 0, start : start + length, start : start + length] = np.tri(length, dtype=bool)
            start += length
    np.testing.assert_array_equal(document_mask(positions).numpy(), expected)


def test_a_packed_sequence_gives_each_document_its_own_hidden_states() -> None:
    model = _model("none")
    tokens = torch.randint(0, 131, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        packed, _ = model(tokens, positions)
        alone = [model(part)[0] for part in tokens.split((5, 1, 6), dim=1)]
    # other GEMM and attention shapes: fp32 sums in another order
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


def _model(recompute: str) -> SerialModel:
    specs = decoder_layers(MODEL, recompute)  # type: ignore[arg-type]
    return SerialModel(
        specs,
        TensorParallel(),
        lambda spec, tp: make_layer(spec, tp, seed=3, initializer_range=MODEL.initializer_range),
    )


def _loss_gradients_and_kept_bytes(recompute: str, packed: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    model = _model(recompute)
    tokens = torch.randint(0, 131, (2, 32), generator=torch.Generator().manual_seed(0))
    positions = (torch.arange(32) % 11).expand(2, 32)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden, weight = model(tokens, positions if packed else None)
    loss = head_loss(hidden, weight, tokens, 131, TensorParallel())
    loss.backward()
    return (
        loss.detach(),
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        sum(kept.values()),
    )


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_recomputation_keeps_less_and_changes_no_bit(packed: bool) -> None:
    loss, gradients, kept = _loss_gradients_and_kept_bytes("none", packed)
    assert len(gradients) == len(list(_model("none").parameters()))  # the embedding too, whose inputs are integers
    kept_before = kept
    for recompute in ("selective", "full"):
        again, gradients_again, kept = _loss_gradients_and_kept_bytes(recompute, packed)
        assert torch.equal(loss, again), recompute
        for name, gradient in gradients.items():
            assert torch.equal(gradient, gradients_again[name]), f"{recompute}: {name}"
        assert kept < kept_before, f"{recompute} keeps {kept} bytes, the mode before it {kept_before}"
        kept_before = kept


def test_every_layer_names_its_parameters_as_transformers_does() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {name: getattr(MODEL, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {name: getattr(MODEL, name) for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")}
    theirs = {name: tuple(p.shape) for name, p in LlamaForCausalLM(LlamaConfig(**sizes, **heads)).named_parameters()}
    pieces = [piece for p in _model("none").parameters() for piece in p.shard.pieces()]  # type: ignore[attr-defined]
    assert {piece.name: piece.shape for piece in pieces} == theirs
    assert len(pieces) == len(theirs)


def test_the_decoder_imports_no_deepspeed() -> None:
    # models run where no DeepSpeed is installed: generation, export, the serial specification
    code = "import sys, models.decoder; print([m for m in sys.modules if m.partition('.')[0] == 'deepspeed'])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
