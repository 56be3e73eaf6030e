"""Attention over ranks that share sequences against one process alone: every kind, kernel, family and cut."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.varlen as varlen
from torch import Tensor

import models.attention as attention
from megalite.config.sections import ContextParallelKind
from megalite.parallel.collectives import ContextParallel, TensorParallel
from megalite.parallel.context import own_places
from megalite.parallel.layers import BlockInput
from tests.helpers.hub_attention import built, pieces_of_gradients
from tests.helpers.rank_pool import run_ranks
from tests.helpers.replicated_gradients import sum_parts
from tests.helpers.varlen_loop import varlen_by_loop
from tests.ranks.models.test_attention import EVERYTHING, _model, draw

SEQ, SAMPLES = 32, torch.tensor([5, 900])
DOCUMENTS = torch.stack([torch.arange(SEQ) % 9, torch.arange(SEQ) % 17])
MODELS: list[dict[str, Any]] = [
    *EVERYTHING,
    {"attention_dropout": 0.3, "num_key_value_heads": 4},
    {"attention_dropout": 0.3, "attn_logit_softcapping": 2.0, "sliding_window": 5},
]
KINDS: tuple[ContextParallelKind, ...] = ("all_gather", "ulysses")


def _observed(options: dict[str, Any], tp: TensorParallel, positions: Tensor | None, recompute: Any) -> list[Any]:
    """Output and gradients of this rank, in float64, with the places of their numbers in the whole."""
    model, cp = _model(max_position_embeddings=SEQ, **options), tp.context

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        return draw(*shape, seed=sum(name.encode())) * 0.4 + (0.8 if len(shape) == 1 else 0.0)

    layer = built(model, 0, weight, tp, recompute, torch.float64).train()
    hidden, direction = draw(2, SEQ, 44, seed=1).double(), draw(2, SEQ, 44, seed=2).double()
    places = own_places(SEQ // tp.sequence_parts, tp)
    hidden = hidden[:, places].clone().requires_grad_()
    documents = None if positions is None else int((positions == 0).sum())
    output = layer(hidden, layer.shared_inputs(BlockInput(hidden, positions, documents=documents)), SAMPLES)
    (output * direction[:, places]).sum().backward()
    sum_parts(layer, tp)
    if cp.size > 1:
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad, group=cp.group)
    rows = slice(None), places
    return [
        ("output", rows, output.detach()),
        ("gradient of the input", rows, hidden.grad),
        *((f"gradient of {name}", source, gradient) for name, source, gradient in pieces_of_gradients(layer)),
    ]


def _differences(rank: int, cp_size: int, tp_size: int, as_on_cuda: bool) -> list[str]:
    """What this rank sees differ from one process alone."""
    world = torch.arange(cp_size * tp_size).view(cp_size, tp_size)
    groups = [dist.new_group(ranks.tolist()) for ranks in [*world.unbind(0), *world.unbind(1)]]
    context_rank, tensor_rank = divmod(rank, tp_size)
    found = []
    for options, positions, recompute in product(MODELS, (None, DOCUMENTS), ("none", "selective")):
        with patch.object(varlen, "varlen_attn", varlen_by_loop):
            alone = {name: value for name, _, value in _observed(options, TensorParallel(), positions, recompute)}
            for kind, cut in product(KINDS, {False, tp_size > 1}):
                cp = ContextParallel(cp_size, context_rank, groups[cp_size + tensor_rank], kind)
                tp = TensorParallel(tp_size, tensor_rank, groups[context_rank], cut, cp)
                kernels = patch.object(attention, "why_not_flash", lambda *_: None if as_on_cuda else "a CPU")
                with kernels:
                    seen = _observed(options, tp, positions, recompute)
                for name, place, value in seen:
                    expected = alone[name][place]
                    if value.shape != expected.shape or not torch.allclose(value, expected, rtol=1e-10, atol=1e-10):
                        found.append(f"{name} of {options}, {kind}, {cut=}, {recompute}, {positions is None=}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("cp_size", "tp_size", "as_on_cuda"), [(2, 1, False), (4, 1, True), (2, 2, True)])
def test_attention_over_ranks_that_share_sequences_is_the_same(cp_size: int, tp_size: int, as_on_cuda: bool) -> None:
    """With 1, 2, 4 and 8 key/value heads, so more and fewer than ranks; on a GPU documents are boundaries, not masks.
    In float64: nothing but rounding of 1e-16."""
    found = run_ranks(_differences, cp_size * tp_size, cp_size, tp_size, as_on_cuda)
    for rank, differences in enumerate(found):
        assert not differences, f"rank {rank}: {differences}"
