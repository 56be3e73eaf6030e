"""Section `deepspeed`: merged into the DeepSpeed config, refused if it contradicts another option of the run.

The keys are DeepSpeed 0.19's; a tuple is a path inside the section.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

from megalite.config.errors import shown
from megalite.config.foreign_words import WordRow, answer_to_value, leaves, stack
from megalite.config.suggestions import nearest_name

PASSED_ON = frozenset(
    {
        "aio", "data_types", "disable_python_gc", "dump_state", "fp16", "log_level", "memory_breakdown",
        "steps_per_print", "zero_force_ds_cpu_optimizer", "zero_optimization",
    }
)  # fmt: skip
"""Top-level keys that may be set, because DeepSpeed 0.19.8 does something with them here. Every other key that it knows
has a row in `stacks/deepspeed.yaml`, which says why not; keys that it does not know it would ignore silently."""

SECTIONS = ("data_types", "fp16", "zero_optimization")
"""Those of them that must be sections."""

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

REORDERING = ("zero_optimization", "round_robin_gradients")
"""DeepSpeed 0.19.8 permutes the flat weights of ZeRO-1 and ZeRO-2 if this is set, but not the map from parameters to
them (stage_1_and_2.py, `_create_param_mapping`): training is right, reading or writing fp32 state is not."""


class DeepSpeedProblems(ValueError):
    """Raised for keys that cannot be set; `found` has the path in the section and a sentence of each."""

    def __init__(self, found: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(sentence for _, sentence in found))
        self.found = found


@cache
def refused_keys() -> dict[tuple[str, ...], WordRow]:
    """Returns the paths of keys that cannot be set, each with its row in the table of DeepSpeed's words."""
    rows = (row for row in stack("deepspeed").rows if row.take != "deepspeed")
    return {tuple(word.split(".")): row for row in rows for word in row.words}


def check_pass_through(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options unchanged, or raises DeepSpeedProblems with the option to use instead of each key."""
    found = dict(problems_with_keys(options))
    if found:
        raise DeepSpeedProblems(list(found.items()))
    return options


def without_refused(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a config without the keys of its section `deepspeed` that cannot be set."""
    if not isinstance(values.get("deepspeed"), dict):
        return values
    kept = copy.deepcopy(values)
    for path, _ in problems_with_keys(values["deepspeed"]):
        section = kept["deepspeed"]
        for name in path[:-1]:
            section = section.get(name, {})
        section.pop(path[-1], None)
    return kept


def problems_with_keys(options: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the path of each key that cannot be set, and a sentence about it."""
    if has(options, REORDERING) and options["zero_optimization"]["round_robin_gradients"]:
        yield (
            REORDERING,
            "deepspeed.zero_optimization.round_robin_gradients makes DeepSpeed 0.19 read and write other weights than "
            "it is asked for, so no checkpoint would be right: remove it",
        )
    if (path := _cpu_offload(options)) is not None:
        key = f"deepspeed.{'.'.join(path)}"
        yield (
            path,
            f"{key} is not set there but through offload.optimizer: remove {key} and set offload.optimizer cpu",
        )
    for section in SECTIONS:
        if section in options and not isinstance(options[section], dict):
            yield (
                (section,),
                f"deepspeed.{section} must be a section with options of its own, got {shown(options[section])}",
            )
    for leaf, value in leaves(options):
        if said := answer_to_value(value):
            key = f"deepspeed.{'.'.join(leaf)}"
            yield leaf, f"{key} is {shown(value)}, a word {said}: remove {key}"
            continue
        refused = [leaf[:length] for length in range(len(leaf), 0, -1) if leaf[:length] in refused_keys()]
        if refused:
            yield refused[0], _refusal(refused[0])
        elif leaf[0] not in PASSED_ON:
            yield leaf[:1], _unknown(leaf[0])
        elif len(leaf) > 1 and leaf[0] in NESTED and leaf[1] not in NESTED[leaf[0]]:
            meant = nearest_name(leaf[1], NESTED[leaf[0]])
            hint = f'did you mean "{meant}"?' if meant else f"remove deepspeed.{leaf[0]}.{leaf[1]}"
            yield leaf[:2], f'DeepSpeed 0.19 has no option "{leaf[1]}" in its section {leaf[0]}: {hint}'


def _refusal(path: tuple[str, ...]) -> str:
    """Returns the sentence for a key that cannot be set."""
    key, here = ".".join(path), refused_keys()[path].in_words
    if here.startswith("removed"):
        instead = here.removeprefix("removed").removeprefix("; ")
        return f"DeepSpeed 0.19 removed {key}: remove deepspeed.{key}" + (f"; here {instead}" if instead else "")
    if here.startswith("nothing"):
        return f"deepspeed.{key} cannot be set: {here.removeprefix('nothing: ')}: remove deepspeed.{key}"
    if here.startswith("not here"):
        return f"deepspeed.{key} is {here}: remove deepspeed.{key}"
    return f"deepspeed.{key} is not set there but through {here}: remove deepspeed.{key} and set {here}"


def _cpu_offload(options: dict[str, Any]) -> tuple[str, ...] | None:
    """Returns the path of the key by which DeepSpeed is told to keep the optimizer in host memory; None if it is not.

    Its own ways to NVMe and of parameters have no option of ours."""
    zero = options.get("zero_optimization")
    if not isinstance(zero, dict):
        return None
    section = zero.get("offload_optimizer")
    if isinstance(section, dict) and section.get("device") == "cpu":
        return "zero_optimization", "offload_optimizer"
    return ("zero_optimization", "cpu_offload") if zero.get("cpu_offload") else None


def offloads_to_nvme(options: dict[str, Any]) -> bool:
    """Returns whether DeepSpeed keeps the optimizer's state on NVMe."""
    section = options.get("zero_optimization", {}).get("offload_optimizer")
    return isinstance(section, dict) and section.get("device") == "nvme"


def compiled_extensions(options: dict[str, Any]) -> tuple[str, ...]:
    """Returns the extensions of torch that DeepSpeed compiles in ranks with these options, as their folders are called.

    Without such options there are none: `offload.optimizer cpu` compiles in a folder of its own (cpu_adam.py).
    """
    zero = options.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    moved = [zero.get(key) for key in ("offload_optimizer", "offload_param")]
    has_nvme = any(isinstance(section, dict) and section.get("device") == "nvme" for section in moved)
    needs = {
        "async_io": has_nvme,
        "gds": has_nvme,
        "quantizer": any(value for key, value in zero.items() if key.startswith("zero_quantized_")),
    }
    return tuple(name for name, is_needed in needs.items() if is_needed)


def _unknown(key: str) -> str:
    """Returns the message for a key that DeepSpeed would ignore, with the key or option that was probably meant."""
    ours = {path[0]: row.option for path, row in refused_keys().items() if len(path) == 1 and row.option}
    if said := answer_to_value(key):
        return f"deepspeed.{key} is a word {said}: remove deepspeed.{key}"
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
