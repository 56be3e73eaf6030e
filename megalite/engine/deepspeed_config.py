"""The arguments of `deepspeed.initialize`: the configuration, as a pure function of ours, and the torch optimizer.

Every setting whose default has changed between DeepSpeed versions, or would be wrong here, is set explicitly. The
optimizer is torch's: DeepSpeed's own would compile kernels at start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megalite.config import Config, ResolvedLayout
from megalite.config.deepspeed import has
from megalite.config.sections import OptimizerConfig

NEVER = 1 << 31
BUCKET_ELEMENTS = 50_000_000  # gradients per reduction: the buffers of DeepSpeed's default (5e8) would be 2 GB each
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}  # by `optimizer.name`
OFFLOADS = ("offload_param", "offload_optimizer")


def deepspeed_config(config: Config, layout: ResolvedLayout) -> dict[str, Any]:
    """Returns the configuration for `deepspeed.initialize`, with the user's `deepspeed` section merged in."""
    precision, training, reduction = config.precision, config.training, config.precision.reduction_dtype
    ours: dict[str, Any] = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": training.gradient_clipping,  # 0 before 0.19.3, 1 since
        # by default the format of the weights: BF16_Optimizer would round its fp32 sums to bf16, also those of a single
        # replica, and ZeRO-2 and ZeRO-3 would sum every micro-batch's gradients in bf16
        "communication_data_type": reduction,
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        # a plain torch optimizer is "untested" to ZeRO unless it is Adam
        "zero_allow_untested_optimizer": True,
        # and not DeepSpeed's own for the CPU, without which an offloaded optimizer would be refused
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": layout.zero_stage,
            # stage 1 reduces after backward, when the gradients exist anyway: copying them into one buffer first
            # costs two passes over them and twice their memory
            "contiguous_gradients": layout.zero_stage > 1,
            # with it stage 2 divides by the number of replicas before it widens gradients for the sum, and rounds those
            # of three; 0.19.8 moves the same bytes without it
            "reduce_scatter": layout.zero_stage != 2 or reduction == precision.dtype,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            # False before 0.19.5, True since
            **{key: {"pin_memory": True} for key in OFFLOADS if has(config.deepspeed, ("zero_optimization", key))},
        },
        "bf16": {
            "enabled": precision.dtype == "bf16",
            # a bf16 gradient is freed as soon as its fp32 sum has taken it; and DeepSpeed#7985, which left the last
            # micro-batch out of the reduction, is about the other way
            "immediate_grad_update": True,
            # a step with a gradient that is not finite is skipped; False before 0.19.3, True since
            "check_grad_overflow": True,
        },
        "fp16": {"enabled": precision.dtype == "fp16"},
        # activations travel whole: cutting and re-gathering them over the tensor-parallel ranks doubles the messages,
        # and under sequence parallelism they are cut already. Recomputation is ours (megalite.parallel.layers).
        "pipeline": {
            "pipe_partitioned": False,
            "grad_partitioned": False,
            "use_reentrant": False,
            "activation_checkpoint_interval": 0,
        },
    }
    if precision.dtype != "fp32":
        ours["data_types"] = {"grad_accum_dtype": precision.gradient_accumulation_dtype}
    return _merged(ours, config.deepspeed)


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Merges `theirs` over `ours`, section by section; contradictions were refused when the config was loaded."""
    result = dict(ours)
    for key, value in theirs.items():
        both_sections = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both_sections else copy.deepcopy(value)
    return result


def build_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds AdamW or SGD over two groups: matrices decay, vectors (norms and biases) do not.

    Both groups exist on every pipeline stage, since every stage holds a block: DeepSpeed's gradient norm does one
    collective per non-empty group and would wait forever for a stage with fewer (DeepSpeed#1522).
    """
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if len(p.shard.shape) > 1], "weight_decay": options.weight_decay},  # type: ignore[attr-defined]
        {"params": [p for p in parameters if len(p.shard.shape) == 1], "weight_decay": 0.0},  # type: ignore[attr-defined]
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)
