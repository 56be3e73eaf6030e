"""Weight gradients computed after backward against those of one backward, to the bit: the GEMMs and the order of their
operands are the same, so no tolerance is needed. The ordinary backward is held against transformers elsewhere."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megalite.config import ModelConfig
from megalite.parallel import linear
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.deferred_weight_gradients import compute_put_off, put_off_weight_gradients
from megalite.parallel.expert_balance import ExpertBalance
from megalite.parallel.layers import SerialModel, make_layer, named_shards
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.loss import head_loss
from models.decoder import decoder_layers
from tests.helpers.late_gradients import SIZES, Sums, late_gradients

SERIAL = TensorParallel()
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped queries with norms": {"num_key_value_heads": 2, "query_key_norm": "per_head"},
    "biases, dropout, tied": {
        "normalization": "layernorm",
        "gated_mlp": False,
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "position_embedding": "learned",
        "max_position_embeddings": 40,
        "residual_dropout": 0.2,
        "tie_word_embeddings": True,
    },
    # 66 choices of 40 experts: some get no token, and still a gradient
    "experts": {"num_experts": 40, "num_experts_per_tok": 2, "moe_intermediate_size": 29},
    "parallel residual": {"use_parallel_residual": True},
}
LINEAR = ("qkv_proj", "o_proj", "up_projections", "down_proj")  # the layers whose weights wait
PRECISIONS = ["fp32", "bf16", "widened bf16"]
Gradients = dict[str, Tensor]


def built(kind: str, recompute: str = "none", dtype: torch.dtype = torch.float32) -> SerialModel:
    model = ModelConfig.model_validate(SIZES | KINDS[kind])
    layers = decoder_layers(model, recompute)  # type: ignore[arg-type]
    return SerialModel(
        layers, SERIAL, lambda spec, tp: make_layer(spec, tp, seed=3, initializer_range=model.initializer_range)
    ).to(dtype)


def loss_of(model: SerialModel, micro_batch: int = 0) -> Tensor:
    tokens = torch.randint(0, 131, (1, 33), generator=torch.Generator().manual_seed(micro_batch))
    hidden, weight = model(tokens, None, torch.tensor([micro_batch]))
    return head_loss(hidden, weight, tokens.roll(-1), 131, SERIAL) / 33


def taken_gradients(model: nn.Module) -> Gradients:
    """The gradients that backward has left, which are reset."""
    found = {name: p.grad for name, p in named_shards(model) if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def computed(model: nn.Module, products: list[Any]) -> Gradients:
    names = {parameter: name for name, parameter in named_shards(model)}
    return {names[weight]: gradient for weight, gradient in late_gradients(products).items()}


def assert_equal_to_the_bit(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype, name
        assert torch.equal(found[name], gradient), f"{name}: {(found[name] - gradient).abs().max()} apart"


def set_precision(precision: str, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(linear, "_cpu_multiplies_bf16", lambda: precision != "widened bf16")
    return torch.float32 if precision == "fp32" else torch.bfloat16


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_put_off_are_those_of_one_backward(
    kind: str, recompute: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = set_precision(precision, monkeypatch)
    model = built(kind, recompute, dtype)
    loss = loss_of(model)
    loss.backward()
    expected = taken_gradients(model)
    assert all(gradient.any() for name, gradient in expected.items() if "experts" not in name)

    queue = put_off_weight_gradients(model)
    loss_again = loss_of(model)
    assert torch.equal(loss, loss_again)
    loss_again.backward()
    at_once = taken_gradients(model)
    late = computed(model, queue.take())
    assert late.keys() == {name for name in expected if name.endswith(tuple(f"{one}.weight" for one in LINEAR))}
    assert not late.keys() & at_once.keys()
    assert_equal_to_the_bit(at_once | late, expected)


def test_micro_batches_may_wait_together() -> None:
    # as a stage does that is two weight gradients behind: each backward's products stay apart
    model = built("experts", "full")
    expected = []
    for micro_batch in range(3):
        loss_of(model, micro_batch).backward()
        expected.append(taken_gradients(model))
    queue = put_off_weight_gradients(model)
    losses = [loss_of(model, micro_batch) for micro_batch in range(3)]
    at_once, waiting = [], []
    for loss in losses:
        loss.backward()
        at_once.append(taken_gradients(model))
        waiting.append(queue.take())
    for micro_batch in range(3):
        late = computed(model, waiting[micro_batch])
        assert_equal_to_the_bit(at_once[micro_batch] | late, expected[micro_batch])


def layer(in_features: int = 5, out_features: int = 7, bias: bool = True) -> ColumnParallelLinear:
    column = ColumnParallelLinear(in_features, {"": out_features}, bias, SERIAL)
    with torch.no_grad():
        for seed, parameter in enumerate(column.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed))
    return column


def draw(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_memory_order(x: Tensor) -> Tensor:
    return x


def transposed_in_memory(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("shape", "bias", "arranged"),
    [
        *[(shape, bias, in_memory_order) for shape in ((2, 3), (1, 1), (4,), (0,)) for bias in (False, True)],
        ((4, 250), True, in_memory_order),  # long enough that the order of operands changes bits
        # without a bias alone: torch adds one to such an input in another kernel. Our layers have none such
        ((2, 3), False, transposed_in_memory),
    ],
)
def test_one_layer_to_the_bit(
    shape: tuple[int, ...],
    bias: bool,
    arranged: Callable[[Tensor], Tensor],
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs and gradients, also of a single token, of none, and of tensors that are not in the order of memory."""
    dtype = set_precision(precision, monkeypatch)
    column = layer(33, bias=bias).to(dtype)

    def passed() -> tuple[Tensor, Tensor, Gradients]:
        x = arranged(draw(*shape, 33).to(dtype)).requires_grad_()
        y = column(x)
        y.mul_(2)  # in place, as residuals and dropout change it
        y.backward(arranged(draw(*shape, 7, seed=8).to(dtype)))
        assert x.grad is not None
        found = {name: p.grad for name, p in column.named_parameters() if p.grad is not None}
        column.zero_grad(set_to_none=True)
        return y.detach(), x.grad, found

    y, x_grad, expected = passed()
    queue = put_off_weight_gradients(column)
    y_again, x_grad_again, found = passed()
    assert torch.equal(y, y_again) and torch.equal(x_grad, x_grad_again)
    assert "weight" not in found
    assert_equal_to_the_bit(found | {"weight": late_gradients(queue.take())[column.weight]}, expected)


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_applied_several_times_gets_one_gradient(times: int, dtype: torch.dtype) -> None:
    column = layer(6, 6).to(dtype)

    def backward() -> None:
        x = draw(2, 3, 6).to(dtype).requires_grad_()
        for _ in range(times):
            x = column(x)
        x.backward(draw(2, 3, 6, seed=8).to(dtype))

    backward()
    expected = column.weight.grad
    column.weight.grad = None
    queue = put_off_weight_gradients(column)
    backward()
    products = queue.take()
    assert len(products) == times
    (found,) = late_gradients(products).values()
    assert expected is not None and torch.equal(found, expected)
    assert not products and not queue.take()


def test_no_gradient_is_lost_where_the_input_needs_none() -> None:
    column = layer(bias=False)
    queue = put_off_weight_gradients(column)
    column(draw(2, 3, 5)).sum().backward()
    assert column.weight.grad is not None
    torch.testing.assert_close(column.weight.grad, draw(2, 3, 5).sum((0, 1)).expand(7, 5))  # fp32 in another order
    assert queue.take() == []


def test_a_frozen_weight_puts_nothing_off() -> None:
    column, x = layer().requires_grad_(False), draw(2, 3, 5).requires_grad_()
    queue = put_off_weight_gradients(column)
    column(x).sum().backward()
    assert x.grad is not None and queue.take() == []


def test_without_gradients_layers_compute_the_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_Product", None)
    column, x = layer(), draw(2, 3, 5).requires_grad_()
    queue = put_off_weight_gradients(column)
    with torch.no_grad():
        y = column(x)
    assert y.grad_fn is None and torch.equal(y, F.linear(x, column.weight, column.bias))
    assert queue.take() == []


def test_backward_may_run_in_another_thread() -> None:
    # on CUDA it does: a queue of the thread or of the context would be another one there
    row = RowParallelLinear(5, 3, False, SERIAL)
    queue = put_off_weight_gradients(row)
    y = row(draw(2, 5).requires_grad_())
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert [product.weight for product in queue.take()] == [row.weight]


@contextmanager
def counted_functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts forward and backward of each custom autograd function of ours."""
    calls: Counter[str] = Counter()

    def counted(function: Callable[..., Any], key: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[key] += 1
            return function(*args)

        return call

    with monkeypatch.context() as patch:
        for function in torch.autograd.Function.__subclasses__():
            if function.__module__.startswith(("megalite.parallel", "models")):
                for way in ("forward", "backward"):
                    name = f"{function.__name__}.{way}"
                    patch.setattr(function, way, staticmethod(counted(getattr(function, way), name)))
        yield calls


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_function_runs_twice(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own split of backward runs each custom function once for inputs and once more for weights."""
    model = built("experts", recompute)
    with counted_functions(monkeypatch) as ordinary:
        loss_of(model).backward()
    assert {"_RMSNorm.backward", "_SwiGLU.backward", "_HeadLoss.backward", "_ToExperts.backward"} <= ordinary.keys()
    queue = put_off_weight_gradients(model)
    with counted_functions(monkeypatch) as split:
        loss_of(model).backward()
        products = queue.take()
        weights = [product.weight for product in products]
        late_gradients(products)
    # without a queue a dense product is torch's own
    without = [{n: times for n, times in seen.items() if not n.startswith("_Product")} for seen in (split, ordinary)]
    assert without[0] == without[1]
    layers = 2 * 2  # of each block: attention's two, and the experts' two
    assert split["_Product.backward"] == split["_GroupedLinear.backward"] == layers
    assert len(weights) == len(set(weights)) == 2 * layers


class Allocations(TorchDispatchMode):
    """Notes every storage that an operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> dict[int, int]:
        """Bytes of each storage that lives."""
        return {key: size for key, (reference, size) in self.storages.items() if not reference.expired()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["llama", "biases, dropout, tied", "experts"])
def test_only_inputs_and_gradients_of_the_products_are_kept(
    kind: str, recompute: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph, no fp32 copy and no other activation lives from one part of backward to the other."""
    model = built(kind, recompute, set_precision(precision, monkeypatch))
    held = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    queue = put_off_weight_gradients(model)
    allocations = Allocations()
    loss_of(model).backward()  # fills the caches of masks and rotations
    queue.take()
    counts = [x for part in model.modules() if isinstance(part, ExpertBalance) for x in vars(part).values()]
    held |= {x.untyped_storage()._cdata for x in counts if isinstance(x, Tensor)}
    model.zero_grad(set_to_none=True)
    gc.disable()  # what only the collector frees, is kept
    try:
        with allocations:
            loss_of(model).backward()
        held |= {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}
        products = queue.take()
        operands = {t.untyped_storage()._cdata for product in products for t in (product.grad, product.x)}
        operands |= {p.groups.ends.untyped_storage()._cdata for p in products if p.groups is not None}
        kept = allocations.alive()
        assert operands <= kept.keys()
        assert kept.keys() - held == operands, f"{[kept[key] for key in kept.keys() - held - operands]} bytes too many"
        if kind == "llama":
            # with h hidden and f intermediate features a block keeps for each token: normalized inputs 2h, attention's
            # output h and the activation f; gradients of q, k, v 3h, of gate and up 2f and of both sums 2h
            h, f = SIZES["hidden_size"], SIZES["intermediate_size"]
            numbers = 2 * 33 * ((2 * h + h + f) + (3 * h + 2 * f + 2 * h))
            assert sum(kept[key] for key in operands) == numbers * (4 if precision == "fp32" else 2)

        gradients = late_gradients(products)
        living = operands & allocations.alive().keys()
        assert not living and gradients, f"{len(living)} operands live on"
    finally:
        gc.enable()


def test_weight_gradients_exist_one_at_a_time() -> None:
    """One that has been added to its sum is freed: none is copied on its way."""
    model = built("llama")
    queue = put_off_weight_gradients(model)
    loss_of(model).backward()
    products, allocations, peaks = queue.take(), Allocations(), [0]
    largest = max(product.weight.nbytes for product in products)
    held = [x.untyped_storage() for product in products for x in (product.grad, product.x)]  # a gradient may take the
    operands = {storage._cdata for storage in held}  # address of one that is freed, and would not be counted
    addresses: list[int] = []

    class Freed(Sums):
        def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
            addresses.append(gradient.untyped_storage()._cdata)
            peaks.append(sum(size for key, size in allocations.alive().items() if key not in operands))

    count = len(products)
    with allocations:
        compute_put_off(products, Freed())
    assert len(addresses) == count
    assert largest <= max(peaks) < 1.5 * largest, "gradients wait for each other, or are copied"
