"""The arguments of `deepspeed.initialize`: the configuration, as a pure function of ours, and the torch optimizer.

Every setting whose default has changed between DeepSpeed versions, or would be wrong here, is set explicitly. The
optimizer is torch's: DeepSpeed's own would compile kernels at start. On the host it may be DeepSpeed's (cpu_adam.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from megalite.config import Config, ResolvedLayout
from megalite.config.deepspeed import has
from megalite.config.sections import OptimizerConfig

NEVER = 1 << 31
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
        # `backward` adds gradients up, and `step`, which is called once per optimizer step, uses them: a stage of a
        # pipeline hands over its gradients in as many parts as its schedule has, and none has to be called the last
        "managed_gradient_accumulation": False,
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        # by default every forward of DeepSpeed's engine waits for all work on the device from the third step on: in a
        # pipeline that is every hand-over, also for messages that are begun ahead
        "timers": {"throughput": {"enabled": False}},
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
            # the buffers of DeepSpeed's default (5e8) would be 2 GB each
            "reduce_bucket_size": config.parallel.gradient_bucket_size,
            "allgather_bucket_size": -(-config.parallel.gradient_bucket_size // 2) * 2,  # an odd one is refused
            # with it stage 2 would free large gradients while they are summed, for little gain (docs/design.md); stage
            # 3 keeps them, and without it would gather weights on the stream that computes
            "overlap_comm": layout.zero_stage == 3,
            # stage 3 gathers ahead what followed when it last recorded a pass; in a pipeline another chunk's pass does,
            # and weights that nobody waits for are gathered again: 5.3 times instead of 4 where that was counted
            **({"stage3_prefetch_bucket_size": 0} if layout.pipeline_parallel_size > 1 else {}),
            **_offloads(config),
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
    }
    if precision.dtype != "fp32":
        ours["data_types"] = {"grad_accum_dtype": precision.gradient_accumulation_dtype}
    return _merged(ours, config.deepspeed)


def _offloads(config: Config) -> dict[str, Any]:
    """Returns the sections of what is offloaded; memory is pinned, which is DeepSpeed's default since 0.19.5."""
    sections: dict[str, Any] = {
        key: {"pin_memory": True} for key in OFFLOADS if has(config.deepspeed, ("zero_optimization", key))
    }
    if config.offload.optimizer == "cpu":
        sections["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return sections


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Merges `theirs` over `ours`, section by section; contradictions were refused when the config was loaded."""
    result = dict(ours)
    for key, value in theirs.items():
        both_sections = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both_sections else copy.deepcopy(value)
    return result


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    options: OptimizerConfig,
    bucket_size: int | None = None,
    *,
    has_cpu_adam: bool = False,
) -> torch.optim.Optimizer:
    """Builds AdamW or SGD: matrices decay, vectors (norms and biases) do not.

    With `bucket_size` there is a group for each bucket of gradients: ZeRO-1 cuts each group into one partition per
    replica, so that the group's gradients can be reduce-scattered in place. Else there are two groups, on every
    pipeline stage, since every stage holds a block: DeepSpeed's gradient norm does one collective per non-empty group
    and would wait forever for a stage with fewer (DeepSpeed#1522).

    `has_cpu_adam`: the parameters it will update are on the host, and DeepSpeed's Adam for the CPU is usable.
    """
    parameters = list(parameters)
    matrices = [p for p in parameters if len(p.shard.shape) > 1]  # type: ignore[attr-defined]
    vectors = [p for p in parameters if len(p.shard.shape) == 1]  # type: ignore[attr-defined]
    groups: list[dict[str, Any]] = [
        {"params": bucket, "weight_decay": decay}
        for decay, decayed in ((options.weight_decay, matrices), (0.0, vectors))
        for bucket in (_buckets(decayed, bucket_size) if bucket_size else [decayed])
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, fused=True)
    if has_cpu_adam:
        return DeepSpeedCPUAdam(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)


def _buckets(parameters: list[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Cuts a list into runs of at most `size` numbers, or of one parameter that has more."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if parameter.numel() > room:
            buckets.append([])
            room = size
        buckets[-1].append(parameter)
        room -= parameter.numel()
    return buckets
