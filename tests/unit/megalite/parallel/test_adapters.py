"""Adapters of the layers of one process: what is trained, what it is called, and what a frozen weight costs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.config import ModelConfig
from megalite.config.sections import AdapterConfig
from megalite.parallel.adapters import is_factor, with_adapters
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel, make_layer
from megalite.parallel.loss import head_loss
from models.decoder import decoder_layers
from tests.helpers.odd_sizes import MODEL

SIZES = ModelConfig.model_validate(MODEL | {"num_hidden_layers": 2})
MAKE = partial(make_layer, seed=3, initializer_range=0.1)


def model(adapter: AdapterConfig, tp: TensorParallel | None = None) -> SerialModel:
    return SerialModel(with_adapters(decoder_layers(SIZES), adapter), tp or TensorParallel(), MAKE)


def pieces(made: SerialModel) -> dict[str, torch.Tensor]:
    """The trained global tensors, or a rank's blocks of them, by name."""
    return {
        piece.name: parameter[piece.target].detach()
        for parameter in made.parameters()
        if parameter.requires_grad
        for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
    }


def test_only_the_factors_of_the_targets_are_trained_under_the_names_of_the_weights() -> None:
    """peft's names are made of them, and a checkpoint's."""
    lora = AdapterConfig(name="lora", rank=3, targets=("q_proj", "v_proj", "down_proj"))
    found = {name: tuple(value.shape) for name, value in pieces(model(lora)).items()}
    shapes = {"self_attn.q_proj": (48, 48), "self_attn.v_proj": (24, 48), "mlp.down_proj": (48, 101)}
    assert found == {
        f"model.layers.{layer}.{target}.{factor}": shape
        for layer in range(2)
        for target, (rows, columns) in shapes.items()
        for factor, shape in (("lora_A", (3, columns)), ("lora_B", (rows, 3)))
    }
    assert all(map(is_factor, found))


def test_initial_factors_are_as_pefts_and_do_not_depend_on_the_layout() -> None:
    """A begins uniform up to 1 / sqrt(columns), whole columns, also of a part; B at zero, so that nothing changes."""
    lora = AdapterConfig(name="lora", rank=64)
    whole = pieces(model(lora))
    for name, value in whole.items():
        if name.endswith("lora_B"):
            assert not value.any(), name
            continue
        bound = value.shape[1] ** -0.5
        assert 0.98 * bound < value.abs().max() <= bound, name
        assert abs(value.std().item() / bound - 3**-0.5) < 0.02, name
    parts = [pieces(model(lora, TensorParallel(2, rank))) for rank in range(2)]
    for name, value in whole.items():
        both = [part[name] for part in parts]
        if both[0].shape != value.shape:
            both = [torch.cat(both, dim=1 if name.endswith("lora_A") else 0)]
        assert torch.equal(both[0], value), name


def test_frozen_weights_cost_no_products_of_gradients() -> None:
    """Backward of a trained model has two products for each one of forward, beside adapters one; those of the first
    block's projections are not needed at all."""
    draw = np.random.default_rng(5)
    tokens, targets = (torch.from_numpy(draw.integers(0, SIZES.vocab_size, (2, 33))) for _ in range(2))
    flops = {}
    for name in ("none", "lora"):
        made = model(AdapterConfig(name=name, rank=1 if name == "lora" else 16))
        with FlopCounterMode(display=False) as counter:
            loss = head_loss(*made(tokens), targets, SIZES.vocab_size, TensorParallel())
            loss.backward()
        flops[name] = counter.get_total_flops()
        assert all((p.grad is not None) == p.requires_grad for p in made.parameters())
    assert flops["lora"] < 0.72 * flops["none"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_those_of_the_merged_weight(recompute: str) -> None:
    """d/dA and d/dB through `W + s B A` of plain matrices, in float64: each projection has its own columns of x A^T."""
    lora = AdapterConfig(name="lora", rank=2, alpha=3.0, targets=("q_proj", "v_proj", "up_proj", "down_proj"))
    made = SerialModel(with_adapters(decoder_layers(SIZES, recompute), lora), TensorParallel(), MAKE).double()  # type: ignore[arg-type]
    plain = SerialModel(decoder_layers(SIZES), TensorParallel(), MAKE).double()
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(SIZES.vocab_size, (2, 33), generator=draw) for _ in range(2))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    factors = pieces(made)
    with torch.no_grad():
        for parameter in plain.parameters():
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                path = piece.name.rpartition(".")[0]
                if f"{path}.lora_A" in factors:
                    parameter[piece.target] += 1.5 * factors[f"{path}.lora_B"] @ factors[f"{path}.lora_A"]
    for each in (made, plain):
        head_loss(*each(tokens), targets, SIZES.vocab_size, TensorParallel()).backward()
    whole = {
        piece.name: parameter.grad[piece.target]
        for parameter in plain.parameters()
        for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
    }
    for parameter in made.parameters():
        for piece in parameter.shard.pieces() if parameter.requires_grad else ():  # type: ignore[attr-defined]
            path, factor = piece.name.rpartition(".")[::2]
            gradient, a, b = whole[f"{path}.weight"], factors[f"{path}.lora_A"], factors[f"{path}.lora_B"]
            wanted = 1.5 * (b.t() @ gradient if factor == "lora_A" else gradient @ a.t())
            assert torch.allclose(parameter.grad[piece.target], wanted, rtol=1e-5, atol=1e-6), piece.name


def test_routers_and_experts_stay_frozen_beside_adapters_of_attention() -> None:
    """They get gradients of inputs alone, through which the layers before them learn."""
    sparse = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 21, "num_hidden_layers": 2}
    sizes = ModelConfig.model_validate(MODEL | sparse)
    lora = AdapterConfig(name="lora", rank=3, targets=("q_proj", "o_proj"))
    made = SerialModel(with_adapters(decoder_layers(sizes), lora), TensorParallel(), MAKE)
    tokens = torch.randint(SIZES.vocab_size, (2, 17), generator=torch.Generator().manual_seed(2))
    head_loss(*made(tokens), tokens, SIZES.vocab_size, TensorParallel()).backward()
    assert all((p.grad is not None) == p.requires_grad for p in made.parameters())
    first = next(p for p in made.parameters() if p.requires_grad and p.shard.name.endswith("0.self_attn.o_proj.lora_B"))  # type: ignore[attr-defined]
    assert first.grad is not None and first.grad.any()
