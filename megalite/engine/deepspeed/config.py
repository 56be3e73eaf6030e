"""The configuration that `deepspeed.initialize` takes, as a pure function of ours.

Every setting whose default has changed between DeepSpeed versions, or would be wrong here, is set explicitly.
"""

from __future__ import annotations

import copy
from typing import Any

from megalite.config import Config, ResolvedLayout
from megalite.config.deepspeed import has

NEVER = 1 << 31
OFFLOADS = ("offload_param", "offload_optimizer")


def deepspeed_config(config: Config, layout: ResolvedLayout) -> dict[str, Any]:
    """Returns the configuration for `deepspeed.initialize`, with the user's `deepspeed` section merged in."""
    precision, training = config.precision, config.training
    ours: dict[str, Any] = {
        "train_batch_size": training.global_batch_size * layout.context_parallel_size,  # it counts replicas
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": training.gradient_clipping,  # 0 before 0.19.3, 1 since
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
            "contiguous_gradients": False,  # whose buffer would only take memory: gradients are reduced by us
            "allgather_bucket_size": -(-config.parallel.gradient_bucket_size // 2) * 2,  # an odd one is refused
            # without it stage 3 would gather weights on the stream that computes
            "overlap_comm": layout.zero_stage == 3,
            # stage 3 gathers ahead what followed when it last recorded a pass; in a pipeline another chunk's pass does,
            # and weights that nobody waits for are gathered again: 5.3 times instead of 4 where that was counted
            **({"stage3_prefetch_bucket_size": 0} if layout.pipeline_parallel_size > 1 else {}),
            **_offloads(config),
        },
        "bf16": {
            "enabled": precision.dtype == "bf16",
            "immediate_grad_update": True,  # else each backward would look for gradients
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
