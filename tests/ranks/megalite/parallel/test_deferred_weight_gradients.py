"""Weight gradients put off on tensor-parallel ranks against one backward on the same ranks, to the bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.deferred_weight_gradients import put_off_weight_gradients
from megalite.parallel.layers import SerialModel, make_layer, named_shards
from megalite.parallel.loss import head_loss
from models.decoder import decoder_layers
from tests.helpers.late_gradients import SIZES, late_gradients
from tests.helpers.rank_pool import run_ranks

BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}  # fewer than ranks
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 29}


def _gradients(model: ModelConfig, tp: TensorParallel, recompute: Any, dtype: torch.dtype, split: bool) -> Any:
    """Gradients by name, and the names of those that came late."""
    whole = SerialModel(
        decoder_layers(model, recompute),
        tp,
        lambda spec, tp: make_layer(spec, tp, seed=3, initializer_range=model.initializer_range),
    ).to(dtype)
    names = {parameter: name for name, parameter in named_shards(whole)}
    queue = put_off_weight_gradients(whole) if split else None
    tokens = torch.randint(0, 131, (2, 34), generator=torch.Generator().manual_seed(0))
    (head_loss(*whole(tokens), tokens.roll(-1), 131, tp) / 68).backward()
    gradients: dict[str, Tensor] = {names[p]: p.grad for p in whole.parameters() if p.grad is not None}
    late = {} if queue is None else {names[p]: gradient for p, gradient in late_gradients(queue.take()).items()}
    assert not gradients.keys() & late.keys()
    return gradients | late, late.keys()


def _differences(rank: int) -> list[str]:
    found = []
    for options, recompute, dtype in (
        (BIASED, "none", torch.float32),
        (BIASED, "full", torch.bfloat16),
        (EXPERTS, "selective", torch.float32),
    ):
        model = ModelConfig.model_validate(SIZES | options)
        for sequence_parallel in (False, True):
            tp = TensorParallel(2, rank, dist.group.WORLD, sequence_parallel)
            expected, _ = _gradients(model, tp, recompute, dtype, split=False)
            gradients, late = _gradients(model, tp, recompute, dtype, split=True)
            assert gradients.keys() == expected.keys() and len(late) == 2 * 4
            found += [
                f"{name} of {options}, {recompute=}, {dtype}, {sequence_parallel=}"
                for name, gradient in expected.items()
                if not torch.equal(gradients[name], gradient)
            ]
    return found


def test_gradients_put_off_on_tensor_parallel_ranks_are_those_of_one_backward() -> None:
    for rank, differences in enumerate(run_ranks(_differences, 2)):
        assert not differences, f"rank {rank}: {differences}"
