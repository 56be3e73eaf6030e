"""Section `deepspeed`: merged into the DeepSpeed config, refused where it contradicts a setting of ours.

The keys are DeepSpeed 0.19's; a tuple is a path inside the section.
"""

from __future__ import annotations

from typing import Any

from megalite.config.errors import shown

OWNED: dict[tuple[str, ...], str] = {
    ("train_batch_size",): "training.global_batch_size",
    ("train_micro_batch_size_per_gpu",): "training.micro_batch_size",
    ("gradient_accumulation_steps",): "training.global_batch_size and training.micro_batch_size",
    ("gradient_clipping",): "training.gradient_clipping",
    ("optimizer",): "optimizer.name and its options",
    ("scheduler",): "schedule.name and its options",
    ("fp16", "enabled"): "precision.dtype",
    ("fp16", "auto_cast"): "precision.dtype",
    ("fp16", "fp16_master_weights_and_grads"): "precision.gradient_accumulation_dtype",
    ("bf16",): "precision.dtype",
    ("bfloat16",): "precision.dtype",
    ("torch_autocast",): "precision.dtype",
    ("data_types", "grad_accum_dtype"): "precision.gradient_accumulation_dtype",
    ("data_types", "param_dtype"): "precision.dtype",
    ("zero_optimization", "stage"): "parallel.zero_stage",
    ("tensor_parallel",): "parallel.tensor_parallel_size",
    ("pipeline",): "parallel.pipeline_parallel_size and recompute.mode",
    ("activation_checkpointing",): "recompute.mode",
    ("wandb",): "monitor.wandb",
}
"""DeepSpeed's keys that say again what one of our options says, and that option."""

REMOVED = (
    "nebula",
    "compression_training",
    "amp",
    "quantize_training",
    "sparse_gradients",
    "eigenvalue",
    "sparse_attention",
    "elasticity",
    "graph_harvesting",
    "curriculum_learning",
    "progressive_layer_drop",
)
"""Top-level keys that DeepSpeed 0.19 no longer knows."""

REMOVED_FROM_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
"""Keys of `zero_optimization` that DeepSpeed 0.19 no longer knows."""


def check_pass_through(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options unchanged, or raises ValueError naming the option of ours to use instead."""
    for path, ours in OWNED.items():
        if has(options, path):
            name = "deepspeed." + ".".join(path)
            raise ValueError(f"{name} is not set there but through {ours}: remove {name} and set {ours}")
    removed = [(key,) for key in REMOVED] + [("zero_optimization", key) for key in REMOVED_FROM_ZERO]
    for path in removed:
        if has(options, path):
            raise ValueError(f"DeepSpeed 0.19 removed {'.'.join(path)}: remove deepspeed.{'.'.join(path)}")
    for key in {path[0] for path in OWNED if len(path) > 1}:
        if key in options and not isinstance(options[key], dict):
            raise ValueError(f"deepspeed.{key} must be a section with options of its own, got {shown(options[key])}")
    return options


def has(options: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Whether the nested options contain `path`."""
    here: Any = options
    for key in path:
        if not isinstance(here, dict) or key not in here:
            return False
        here = here[key]
    return True


def is_on(value: Any) -> bool:
    """Whether a DeepSpeed feature is switched on: `true`, or a section whose `enabled` is true."""
    return bool(value.get("enabled", False)) if isinstance(value, dict) else bool(value)
