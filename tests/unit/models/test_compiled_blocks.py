"""Decoder blocks compiled as whole graphs, against the eager ones, and what a stale graph would get wrong.

With torch's `aot_eager` backend: the graphs, forward and backward, without the minutes of a compiler. Collectives go to
a group whose other ranks do not exist, which moves nothing, in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as varlen
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import models.attention as attention
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.float8 import use_float8
from megalite.parallel.layers import BlockInput
from models.decoder import DecoderBlock
from tests.helpers.counting import fake_group
from tests.unit.models.test_attention_inputs import apart

SEQ = 24
WINDOWS = {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention")}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"query_key_norm": "per_head"},
    "olmo2": {"query_key_norm": "full_width", "norm_placement": "post"},
    "gemma2": {
        "normalization": "zero_centered_rmsnorm",
        "norm_placement": "pre_and_post",
        "attn_logit_softcapping": 3.0,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gpt_neox": {
        "normalization": "layernorm",
        "use_parallel_residual": True,
        "gated_mlp": False,
        "hidden_act": "gelu",
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "gpt2": {
        "normalization": "layernorm",
        "position_embedding": "learned",
        "gated_mlp": False,
        "hidden_act": "gelu_new",
    },
}
MODES = [
    (tp, cut, recompute, packed)
    for tp, cut, recompute, packed in product((1, 2, 4), (False, True), ("none", "selective", "full"), (False, True))
    if tp > 1 or not cut
]
FEW = {(1, False, "selective", True), (4, True, "full", True)}


@pytest.fixture(autouse=True)
def _no_graphs_from_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks_of(tp: TensorParallel, recompute: Any = "none", **options: Any) -> list[DecoderBlock]:
    sizes = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = ModelConfig.model_validate(sizes | options)
    blocks = [DecoderBlock(model, recompute, layer, tp) for layer in range(2)]
    draw = torch.Generator().manual_seed(3)
    for parameter in (parameter for block in blocks for parameter in block.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=draw)
    return blocks


def compiled(blocks: list[DecoderBlock]) -> CompileCounterWithBackend:
    """Compiles the blocks as a run does, and counts graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(DecoderBlock.compute, backend=counter, fullgraph=True, dynamic=False)
    for block in blocks:
        block.compiled = function
    return counter


def results(blocks: list[DecoderBlock], seed: int, positions: Tensor | None = None, seq: int = SEQ) -> list[Tensor]:
    """Hidden states, and the gradients of inputs and weights."""
    tp, draw = blocks[0].self_attn.tp, torch.Generator().manual_seed(seed)
    rows = seq // tp.size if tp.sequence_is_cut else seq
    hidden = torch.randn(2, rows, 32, generator=draw, requires_grad=True)
    documents = None if positions is None else int((positions == 0).sum())
    x: Any = BlockInput(hidden, positions, None, documents, {})
    for block in blocks:
        block.zero_grad()
        x = block(x)
    x.hidden.backward(torch.randn(*x.hidden.shape, generator=draw))
    gradients = [parameter.grad.clone() for block in blocks for parameter in block.parameters()]  # type: ignore[union-attr]
    assert hidden.grad is not None
    return [x.hidden.detach(), hidden.grad, *gradients]


def packed(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)


CASES = [
    pytest.param(
        kind, *mode, id=f"{kind} {mode}", marks=() if kind == "llama" and mode in FEW else pytest.mark.exhaustive
    )
    for kind in KINDS
    for mode in MODES
]


@pytest.mark.parametrize(("kind", "size", "cut", "recompute", "documents"), CASES)
def test_equal_blocks_are_one_whole_graph_with_the_eager_results(
    kind: str, size: int, cut: bool, recompute: str, documents: bool
) -> None:
    positions = packed(10, 1, 13) if documents else None
    with fake_group(size) as group:
        blocks = blocks_of(TensorParallel(size, 0, group, cut), recompute, **KINDS[kind])
        expected = results(blocks, 1, positions)
        counter = compiled(blocks)
        assert apart(results(blocks, 1, positions), expected) <= 2e-5  # fp32, sums in another order
        assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_other_families_are_whole_graphs_too(kind: str) -> None:
    """One process, which takes a second; `--exhaustive` has all families on all modes."""
    test_equal_blocks_are_one_whole_graph_with_the_eager_results(kind, 1, False, "none", True)


def test_products_in_float8_are_in_the_graph() -> None:
    pytest.importorskip("torchao")
    with fake_group(2) as group:
        sizes = {"intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 16}
        blocks = blocks_of(TensorParallel(2, 0, group, True), "selective", **sizes)
        use_float8(nn.ModuleList(blocks), "rowwise")
        expected = results(blocks, 1, packed(10, 1, 13))
        counter = compiled(blocks)
        assert apart(results(blocks, 1, packed(10, 1, 13)), expected) <= 2e-5
        assert counter.frame_count == 1


def test_nothing_of_another_micro_batch_is_in_a_graph() -> None:
    """Documents, angles, windows and shapes of the first micro-batch, as constants of a graph, would be used again."""
    options = WINDOWS | {"rope_local_base_freq": 100.0}
    eager, blocks = blocks_of(TensorParallel(), **options), blocks_of(TensorParallel(), **options)
    counter = compiled(blocks)
    for seed, positions in enumerate((packed(10, 1, 13), packed(3, 21), packed(24))):
        assert apart(results(blocks, seed, positions), results(eager, seed, positions)) <= 2e-5
    assert counter.frame_count <= 2  # a block with a window, one without
    for seq, positions in ((24, None), (18, None), (18, packed(5, 13))):
        assert apart(results(blocks, seq, positions, seq), results(eager, seq, positions, seq)) <= 2e-5
    wider = blocks_of(TensorParallel(), **options | {"sliding_window": 6})
    expected = results(wider, 1, packed(10, 1, 13))
    for block, other in zip(blocks, wider, strict=True):
        other.compiled = block.compiled
    assert apart(results(wider, 1, packed(10, 1, 13)), expected) <= 2e-5


def test_a_stale_graph_is_noticed() -> None:
    """The comparison above sees a mask that became a constant."""
    blocks = blocks_of(TensorParallel())
    compute, first = DecoderBlock.compute, []

    def stale(block: DecoderBlock, hidden: Tensor, inputs: Any, sample_ids: Tensor | None) -> Tensor:
        first.append(inputs)
        return compute(block, hidden, first[0], sample_ids)

    expected = results(blocks, 1, packed(3, 21))
    for block in blocks:
        block.compiled = stale
    results(blocks, 0, packed(10, 1, 13))
    assert apart(results(blocks, 1, packed(3, 21)), expected) > 1e-3


def varlen_by_mask(
    q: Tensor, k: Tensor, v: Tensor, edges: Tensor, *_: Any, enable_gqa: bool = False, **options: Any
) -> Tensor:
    """`varlen_attn` in operations whose shapes do not depend on the boundaries' values."""
    token = torch.arange(len(q))
    document = torch.bucketize(token, edges, right=True)
    left, distance = options["window_size"][0], token.unsqueeze(1) - token
    seen = (distance >= 0) & (document.unsqueeze(1) == document)
    seen = seen if left < 0 else seen & (distance <= left)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * options["scale"]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def test_numbers_of_documents_within_a_power_of_two_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for every number of documents would compile for seconds in the middle of a run."""
    eager = blocks_of(TensorParallel())
    lengths = [(3, 4, 5, 6, 6), (10, 1, 1, 1, 1, 5, 5), (3,) * 8, (1,) * 18 + (6,), (1,) * 24]
    batches = [packed(*each) for each in lengths]  # 10, 14, 16, 38 and 48 documents of 48 tokens
    expected = [results(eager, seed, positions) for seed, positions in enumerate(batches)]
    monkeypatch.setattr(attention, "why_not_flash", lambda device, dtype, head_dim: None)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_mask)
    blocks = blocks_of(TensorParallel())
    counter = compiled(blocks)
    for seed, positions in enumerate(batches):
        assert apart(results(blocks, seed, positions), expected[seed]) <= 2e-5
        assert counter.frame_count == (1 if seed < 3 else 2)
