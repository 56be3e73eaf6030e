"""Offloaded activations: what stays on the device, what comes back when, and that no bit of a gradient changes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.config import ModelConfig
from megalite.parallel.activation_offload import SMALLEST_BYTES, ActivationOffload, Copies, OffloadedStorage
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import BlockInput, SerialModel, make_layer
from megalite.parallel.loss import head_loss
from models.decoder import decoder_layers
from tests.helpers.odd_sizes import MODEL

SIZES: dict[str, Any] = MODEL | {"initializer_range": 0.1}
SERIAL = TensorParallel()


def serial(model: ModelConfig, recompute: Any = "none", *, offload: bool) -> SerialModel:
    specs = decoder_layers(model, recompute, offload_activations=offload)
    return SerialModel(specs, SERIAL, lambda spec, tp: make_layer(spec, tp, seed=3, initializer_range=0.1))


def blocks_of(model: SerialModel) -> list[Any]:
    return [model.layers[spec.module_key] for spec in model.specs if spec.is_block]


class WatchedCopies(Copies):
    """The copies of a CPU, with a list of what left in which block, and of what came back."""

    def __init__(self) -> None:
        self.block = -1  # that computes
        self.left: list[tuple[int, StorageWeakRef, int]] = []  # block, storage, bytes
        self.back: list[int] = []  # blocks
        self._block_of: dict[int, int] = {}  # by address of the host's copy

    def to_host(self, storage: UntypedStorage) -> tuple[UntypedStorage, None]:
        self.left.append((self.block, StorageWeakRef(storage), storage.nbytes()))
        host, _ = super().to_host(storage)
        self._block_of[host.data_ptr()] = self.block
        return host, None

    def to_device(self, host: UntypedStorage, device: torch.device) -> tuple[UntypedStorage, None]:
        self.back.append(self._block_of[host.data_ptr()])
        return super().to_device(host, device)

    def on_device(self) -> dict[int, int]:
        """Bytes of each block that have left and whose first copy is still there."""
        found: dict[int, int] = {}
        for block, storage, size in self.left:
            if not storage.expired():
                found[block] = found.get(block, 0) + size
        return found


def watched(recompute: str) -> tuple[list[Any], WatchedCopies]:
    """The blocks of a model that share one watched offloading."""
    blocks, copies = blocks_of(serial(ModelConfig.model_validate(SIZES), recompute, offload=True)), WatchedCopies()
    offload = ActivationOffload(copies)
    for block in blocks:
        block.offload = offload
    return blocks, copies


def through(blocks: list[Any], hidden: Tensor, enter: Callable[[int], None]) -> Tensor:
    """The output of all blocks; calls `enter` before each one's forward."""
    x: Any = BlockInput(hidden)
    del hidden  # which the blocks keep
    for number, block in enumerate(blocks):
        enter(number)
        x = block(x)
    return x


def kept_without(recompute: str, hidden: Tensor) -> int:
    """Bytes of the storages that autograd keeps for the blocks without offloading, those of parameters left out."""
    model = serial(ModelConfig.model_validate(SIZES), recompute, offload=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[StorageWeakRef, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() >= SMALLEST_BYTES:
            kept[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = through(blocks_of(model), hidden, lambda number: None)
    assert output.requires_grad
    return sum(kept.values())


def on_host() -> int:
    return sum(found.on_host.nbytes() for found in gc.get_objects() if isinstance(found, OffloadedStorage))


def loss_and_gradients(model: SerialModel, tokens: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
    hidden, weight = model(tokens, positions, torch.arange(len(tokens)))
    loss = head_loss(hidden, weight, tokens, 131, SERIAL)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def tokens_of(seed: int, batch: int = 3, length: int = 33) -> Tensor:
    return torch.randint(0, 131, (batch, length), generator=torch.Generator().manual_seed(seed))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"residual_dropout": 0.1, "attention_dropout": 0.1, "normalization": "layernorm"},
    {"norm_placement": "post", "query_key_norm": "full_width", "tie_word_embeddings": True},
    {"use_parallel_residual": True, "attn_logit_softcapping": 9.0, "gated_mlp": False, "hidden_act": "relu"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_bit_of_a_gradient_changes(variant: dict[str, Any]) -> None:
    """Over two passes, as the second writes where the first has freed; packed documents keep masks and rotations."""
    gc.collect()  # what other tests have left in circles
    model = ModelConfig.model_validate(SIZES | variant)
    positions = (torch.arange(33) % 11).expand(3, 33)
    for recompute in ("none", "selective", "full"):
        plain, offloading = (serial(model, recompute, offload=offload) for offload in (False, True))
        for step in range(2):
            packed = positions if step else None
            expected, found = (loss_and_gradients(one, tokens_of(step), packed) for one in (plain, offloading))
            assert expected.keys() == found.keys()
            for name, value in expected.items():
                assert torch.equal(value, found[name]), f"{recompute}, step {step}: {name}"
        assert on_host() == 0, "backward has used and freed everything"


def hidden_states(seed: int) -> Tensor:
    return torch.randn(3, 33, 48, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_device_keeps_two_blocks_and_the_host_what_autograd_would_keep(recompute: str) -> None:
    blocks, copies = watched(recompute)
    most = 0

    def enter(number: int) -> None:
        nonlocal most
        most, copies.block = max(most, len(copies.on_device())), number

    inputs = hidden_states(0)
    output = through(blocks, inputs.clone(), enter)
    expected = kept_without(recompute, hidden_states(0).clone())
    assert on_host() == sum(size for _, _, size in copies.left) == expected
    assert most <= 2 and set(copies.on_device()) == {3, 4}, "the last two blocks, which backward enters first"
    output.sum().backward()
    assert on_host() == 0


def test_a_block_comes_back_while_backward_is_in_the_one_behind_it() -> None:
    """With two micro-batches whose passes alternate as in a pipeline, and none of which the other disturbs."""
    blocks, copies = watched("none")
    entered: list[tuple[int, list[int]]] = []  # block that backward enters, blocks that have begun to come back

    def enter_forward(number: int) -> None:
        copies.block = number

    outputs = []
    for seed in range(2):
        hidden = hidden_states(seed).clone()
        x: Any = BlockInput(hidden)
        for number, block in enumerate(blocks):
            enter_forward(number)
            x = block(x)
            leaf = x if isinstance(x, Tensor) else x.hidden
            leaf.register_hook(lambda grad, number=number: entered.append((number, sorted(set(copies.back)))))
        outputs.append(x)
    for output in outputs:
        copies.back.clear()
        entered.clear()
        output.sum().backward()
        for number, back in entered:
            if number < 3:  # the second micro-batch's last two blocks have never left
                assert min(back) == number, f"backward enters block {number}, and {back} have begun to come back"


def test_what_all_blocks_share_moves_once_and_weights_and_small_tensors_stay() -> None:
    """The weights are views of one flat tensor, as ZeRO makes them, and get other memory before backward, as in ZeRO-3.

    Would catch weights that are kept alive by what was saved of them, and gradients that are computed with old ones.
    """
    shared, small = torch.randn(50, 50), torch.randn(SMALLEST_BYTES // 4 - 1)
    layers, copies = [nn.Linear(50, 50) for _ in range(3)], WatchedCopies()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = piece.view(parameter.shape)
    offload = ActivationOffload(copies)

    def scaled(layer: nn.Linear, hidden: Tensor) -> Tensor:
        return layer(hidden) * shared + layer.weight.t().square()[:1] * small[:50]

    inputs = torch.randn(50, 50, requires_grad=True)
    x = y = inputs.clone()
    for layer in layers:
        x, y = offload(layer, lambda value, layer=layer: scaled(layer, value), x), scaled(layer, y)
    assert [size for _, _, size in copies.left] == [10_000] * 4, "three inputs and the shared factor"
    expected = torch.autograd.grad(y.square().sum(), [inputs, *parameters])
    gathered = StorageWeakRef(flat.untyped_storage())
    for parameter in parameters:
        parameter.data = parameter.detach().clone()
    del flat, piece, y
    assert gathered.expired()
    found = torch.autograd.grad(x.square().sum(), [inputs, *parameters])
    assert all(map(torch.equal, expected, found))
