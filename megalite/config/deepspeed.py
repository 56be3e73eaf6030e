"""Section `deepspeed`: merged into the DeepSpeed config, refused if it contradicts another option of the run.

The keys are DeepSpeed 0.19's; a tuple is a path inside the section.
"""

from __future__ import annotations

from typing import Any

from megalite.config.errors import shown
from megalite.config.suggestions import nearest_name

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
    ("communication_data_type",): "precision.gradient_reduction_dtype",
    ("data_types", "param_dtype"): "precision.dtype",
    ("zero_optimization", "stage"): "parallel.zero_stage",
    ("zero_optimization", "reduce_bucket_size"): "parallel.gradient_bucket_size",
    ("tensor_parallel",): "parallel.tensor_parallel_size",
    ("pipeline",): "parallel.pipeline_parallel_size and recompute.mode",
    ("activation_checkpointing",): "recompute.mode",
    ("sequence_parallel_size",): "parallel.sequence_parallel",
    ("data_parallel_size",): "parallel.data_parallel_size",
    ("wandb",): "monitor.wandb",
}
"""DeepSpeed's keys that duplicate one of our options, and that option."""

MEASURING = (
    "it waits for the device around what it times, so that communication no longer goes on beside computation; "
    "steps.jsonl tells seconds, calls and bytes anyway, monitor.timeline and monitor.profile show single steps"
)
AVERAGING = "gradients are the mean over the global batch, whatever the layout"
CONTRADICTING = {
    "gradient_allreduce_op": AVERAGING,
    "prescale_gradients": AVERAGING,
    "gradient_predivide_factor": AVERAGING,
    "managed_gradient_accumulation": "gradients are accumulated until the engine ends the optimizer step",
    "zero_allow_untested_optimizer": "optimizers are plain torch ones, which DeepSpeed calls untested",
    "comms_logger": MEASURING,  # comm/comm.py, `timed_op`
    "wall_clock_breakdown": MEASURING,  # utils/timer.py
    "flops_profiler": MEASURING,  # profiling/flops_profiler/profiler.py: around each module
}
"""Top-level keys that would break an invariant of every run, and why."""

PASSED_ON = frozenset(
    {
        "aio", "autotuning", "checkpoint", "comet", "compile", "csv_monitor",
        "data_efficiency", "data_types", "dataloader_drop_last", "datastates_ckpt",
        "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel", "fp16",
        "hybrid_engine", "log_level", "memory_breakdown",
        "seq_parallel_communication_data_type", "steps_per_print", "tensorboard", "timers",
        "use_data_before_expert_parallelism", "vocabulary_size", "weight_quantization",
        "zero_force_ds_cpu_optimizer", "zero_optimization",
    }
)  # fmt: skip
"""Top-level keys that DeepSpeed 0.19.8 reads and that may be set; it ignores any other key silently."""

NESTED = {
    "fp16": frozenset(
        {
            "auto_cast", "consecutive_hysteresis", "enabled", "fp16_master_weights_and_grads", "hysteresis",
            "initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale",
        }
    ),
    "zero_optimization": frozenset(
        {
            "allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients",
            "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint",
            "enable_sanity_checks", "ignore_unused_parameters", "leaf_module", "legacy_stage1",
            "load_from_fp32_weights", "log_trace_cache_warnings", "memory_efficient_linear", "offload_optimizer",
            "offload_param", "overlap_comm", "override_module_apply", "parameter_alignment",
            "pipeline_loading_checkpoint", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
            "save_muon_momentum_buffer_in_memory", "stage", "stage3_allgather_sequential",
            "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
            "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params", "sub_group_size",
            "use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size", "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights", "zero_quantized_weights",
        }
    ),
}  # fmt: skip
"""Keys of the sections that DeepSpeed 0.19.8 refuses other keys in, once ranks have started."""

REMOVED = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue", "sparse_attention",
    "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
    "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.zeropp_loco_param",
)  # fmt: skip
"""Keys that DeepSpeed 0.19 has removed."""

REORDERING = ("zero_optimization", "round_robin_gradients")
"""DeepSpeed 0.19.8 permutes the flat weights of ZeRO-1 and ZeRO-2 if this is set, but not the map from parameters to
them (stage_1_and_2.py, `_create_param_mapping`): training is right, reading or writing fp32 state is not."""


def check_pass_through(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options unchanged, or raises ValueError naming the option of ours to use instead."""
    for path, ours in OWNED.items():
        if has(options, path):
            name = "deepspeed." + ".".join(path)
            raise ValueError(f"{name} is not set there but through {ours}: remove {name} and set {ours}")
    if has(options, REORDERING) and options["zero_optimization"]["round_robin_gradients"]:
        raise ValueError(
            "deepspeed.zero_optimization.round_robin_gradients makes DeepSpeed 0.19 read and write other weights than "
            "it is asked for, so no checkpoint would be right: remove it"
        )
    if (key := _cpu_offload(options)) is not None:
        raise ValueError(
            f"{key} is not set there but through offload.optimizer: remove {key} and set offload.optimizer cpu"
        )
    for name in REMOVED:
        if has(options, tuple(name.split("."))):
            raise ValueError(f"DeepSpeed 0.19 removed {name}: remove deepspeed.{name}")
    for key in options:
        if key in CONTRADICTING:
            raise ValueError(f"deepspeed.{key} cannot be set: {CONTRADICTING[key]}: remove deepspeed.{key}")
        if key not in PASSED_ON:
            raise ValueError(_unknown(key))
    for key in {path[0] for path in OWNED if len(path) > 1}:
        if key in options and not isinstance(options[key], dict):
            raise ValueError(f"deepspeed.{key} must be a section with options of its own, got {shown(options[key])}")
    _check_nested(options)
    return options


def _cpu_offload(options: dict[str, Any]) -> str | None:
    """Returns the key by which DeepSpeed is told to keep the optimizer in host memory; None if it is not. Its own ways
    to NVMe and of parameters have no option of ours."""
    zero = options.get("zero_optimization")
    if not isinstance(zero, dict):
        return None
    section = zero.get("offload_optimizer")
    if isinstance(section, dict) and section.get("device") == "cpu":
        return "deepspeed.zero_optimization.offload_optimizer"
    return "deepspeed.zero_optimization.cpu_offload" if zero.get("cpu_offload") else None


def offloads_to_nvme(options: dict[str, Any]) -> bool:
    """Returns whether DeepSpeed keeps the optimizer's state on NVMe."""
    section = options.get("zero_optimization", {}).get("offload_optimizer")
    return isinstance(section, dict) and section.get("device") == "nvme"


def _check_nested(options: dict[str, Any]) -> None:
    for section, known in NESTED.items():
        for key in options.get(section, {}):
            if key not in known:
                meant = nearest_name(str(key), known)
                hint = f'did you mean "{meant}"?' if meant else f"remove deepspeed.{section}.{key}"
                raise ValueError(f'DeepSpeed 0.19 has no option "{key}" in its section {section}: {hint}')


def _unknown(key: str) -> str:
    """Returns the message for a key that DeepSpeed would ignore, with the key or option that was probably meant."""
    ours = {path[0]: option for path, option in OWNED.items() if len(path) == 1}
    meant = nearest_name(key, PASSED_ON | ours.keys())
    if meant is None:
        return f'DeepSpeed 0.19 has no option "{key}": remove deepspeed.{key}'
    return f'unknown option "deepspeed.{key}": did you mean "{ours.get(meant, f"deepspeed.{meant}")}"?'


def has(options: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Returns whether the nested options contain `path`."""
    here: Any = options
    for key in path:
        if not isinstance(here, dict) or key not in here:
            return False
        here = here[key]
    return True
