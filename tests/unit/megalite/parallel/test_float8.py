"""Products in float8 against float64, their number, and what they leave alone."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from megalite.config import ConfigError, ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.float8 import Float8Product, Recipe, check_float8_device, use_float8
from megalite.parallel.layers import make_layer
from megalite.parallel.linear import ColumnParallelLinear, LinearLayer
from models.decoder import decoder_layers

# of operands that are normal: e4m3 rounds each by up to 1/16, e5m2, in which tensorwise has gradients, by up to 1/8
LEAST_COSINE = {"rowwise": 0.999, "tensorwise": 0.997}
RECIPES = get_args(Recipe)


def cosine(ours: Tensor | None, exact: Tensor | None) -> float:
    assert ours is not None and exact is not None
    return torch.nn.functional.cosine_similarity(ours.double().flatten(), exact.double().flatten(), dim=0).item()


def problem(dtype: torch.dtype, *, bias: bool = False) -> tuple[ColumnParallelLinear, Tensor, Tensor]:
    """A layer, its input `[3, 16, 80]` and the gradient of its output."""
    draw = torch.Generator().manual_seed(7)
    layer = ColumnParallelLinear(80, {"gate": 32, "up": 16}, bias, TensorParallel())
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1, generator=draw)
    x = torch.randn(3, 16, 80, generator=draw).to(dtype).requires_grad_()
    return layer.to(dtype), x, torch.randn(3, 16, 48, generator=draw).to(dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_and_its_gradients_are_those_of_float64_but_for_rounding(
    recipe: Recipe, dtype: torch.dtype, bias: bool
) -> None:
    layer, x, grad = problem(dtype, bias=bias)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, *layer.parameters())]
    expected = torch.nn.functional.linear(*exact)
    expected.backward(grad.double())
    use_float8(layer, recipe)
    y = layer(x)
    y.add_(torch.zeros_like(y)).backward(grad)  # in place, as residuals are added
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype  # type: ignore[union-attr]
    assert LEAST_COSINE[recipe] < cosine(y, expected) < 1 - 1e-6, "rounded, and by no more than float8"
    for ours, theirs in zip((x, *layer.parameters()), exact, strict=True):
        assert cosine(ours.grad, theirs.grad) > LEAST_COSINE[recipe]
        ratio = ours.grad.double().norm() / theirs.grad.norm()  # type: ignore[union-attr]
        assert abs(ratio - 1) < 0.02


def test_one_large_number_spoils_a_row_or_the_tensor() -> None:
    """What the recipes differ in; e4m3 goes down to 2e-6 of the largest number that it is scaled by."""
    layer, x, _ = problem(torch.float32)
    exact = layer(x).detach()
    with torch.no_grad():
        x[0, 0, 0] = 1e6  # most others are 0 then
    errors = {}
    for recipe in RECIPES:
        use_float8(layer, recipe)
        errors[recipe] = 1 - cosine(layer(x).detach()[1:], exact[1:])
    assert errors["rowwise"] < 1e-3 and errors["tensorwise"] > 0.3


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_hardware_gets_three_products_and_gives_what_is_emulated(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch._scaled_mm`, which torch also has on a CPU, is called once forward and twice backward."""
    layer, x, grad = problem(torch.bfloat16)
    use_float8(layer, recipe)
    layer(x).backward(grad)
    emulated = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    product: Any = layer.product
    monkeypatch.setattr(product, "_on_cpu", product._on_gpu)
    scaled_mm, calls = torch._scaled_mm, list[torch.Size]()

    def counted(a: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(a.shape)
        return scaled_mm(a, *arguments, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    y = layer(x)
    assert calls == [(48, 80)]
    y.backward(grad)
    assert calls == [(48, 80), (48, 48), (48, 48)]  # [tokens, in]; [tokens, out], [out, tokens]
    for ours, theirs in zip((x.grad, layer.weight.grad), emulated, strict=True):
        assert cosine(ours, theirs) > 0.9999


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_layer_is_one_graph_with_the_same_results(recipe: Recipe) -> None:
    layer, x, grad = problem(torch.bfloat16)
    use_float8(layer, recipe)
    y = layer(x)
    y.backward(grad)
    eager = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    compiled: Any = torch.compile(lambda x: layer(x).add_(1.0), backend="aot_eager", fullgraph=True)
    again = compiled(x)
    again.backward(grad)
    assert torch.equal(again, y.detach() + 1.0)
    assert torch.equal(x.grad, eager[0]) and torch.equal(layer.weight.grad, eager[1])  # type: ignore[arg-type]


def test_only_projections_of_attention_and_dense_feed_forward_parts_are_converted() -> None:
    model = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        mlp_only_layers=(0,),
    )
    tp, found = TensorParallel(), {}
    for spec in decoder_layers(model):
        layer = make_layer(spec, tp, seed=0, initializer_range=0.02)
        use_float8(layer, "rowwise")
        for path, module in layer.named_modules():
            if isinstance(module, LinearLayer):
                found[f"{spec.name}.{path}"] = isinstance(module.product, Float8Product)
    converted = {name.removeprefix("model.layers.") for name, is_converted in found.items() if is_converted}
    attention = {f"{layer}.self_attn.{part}" for layer in (0, 1) for part in ("qkv_proj", "o_proj")}
    assert converted == attention | {"0.mlp.up_projections", "0.mlp.down_proj"}


@pytest.mark.parametrize(
    ("recipe", "capability", "remedy"),
    [
        ("rowwise", (8, 9), "use none or tensorwise"),
        ("rowwise", (8, 0), "use none"),
        ("tensorwise", (8, 6), "use none"),
    ],
)
def test_a_gpu_without_float8_is_refused(recipe: Recipe, capability: tuple[int, int], remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"precision.float8 {recipe} needs a GPU.*A GPU has .*: {remedy}$"):
        check_float8_device(recipe, capability, "A GPU")
    check_float8_device(recipe, (9, 0), "another")
    check_float8_device("tensorwise", (8, 9), "another")
