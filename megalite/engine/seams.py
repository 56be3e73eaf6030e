"""The places where we lean on DeepSpeed's insides, each naming the file (DeepSpeed 0.19.8) it leans on.

tests/engine/test_seams.py fails when one of them moves or the defect behind it is gone. Nothing else in the project
touches a private name of DeepSpeed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.utils import safe_get_local_fp32_param

FLAT_PARTITIONS = (
    "single_partition_of_fp32_groups",  # DeepSpeedZeroOptimizer, runtime/zero/stage_1_and_2.py
    "fp32_groups_flat_partition",  # BF16_Optimizer, runtime/bf16_optimizer.py
    "fp32_partitioned_groups_flat",  # DeepSpeedZeroOptimizer_Stage3, runtime/zero/stage3.py
)


def keep_collective_uncompiled() -> None:
    """Keeps DeepSpeed from compiling its shared-memory CPU collective inside `init_distributed`.

    comm/torch.py builds `deepspeed_shm_comm` on every CPU start: 50 s of compiler, a failure where there is no
    compiler, and an endless wait where a killed run left its build lock behind. Only `inference_all_reduce` uses it.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def keep_muon_uncompiled() -> None:
    """Keeps DeepSpeed's Muon from importing torch's compiler on every rank: 1.4 s of CPU and 60 MB for nothing.

    Every ZeRO optimizer imports the module to ask whether it was handed a Muon, and the module compiles its kernels as
    it is read (runtime/zero/muon/original_muon.py). Read it once with the compiling decorator switched off.
    """
    import deepspeed.runtime.compiler as compiler

    decorator = compiler.compile
    compiler.compile = lambda *_, **__: lambda kernel: kernel
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = decorator


def quiet_logging() -> None:
    """Warnings and errors of DeepSpeed stay, without two that every run of ours would print.

    It calls ZeRO with a plain torch optimizer "untested" (runtime/engine.py): our parity tests run exactly that. It
    calls two collectives by names that torch 2.13 deprecates, with a warning per call site and rank.
    """
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    warnings.filterwarnings("ignore", message=".*torch.distributed.*_tensor` is deprecated", category=FutureWarning)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """runtime/pipe/module.py prints its partition with `print`; our layout table says the same."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def flat_partitions(optimizer: Any) -> list[torch.Tensor]:
    """The flat fp32 partitions that the torch optimizer updates on this rank, one per parameter group."""
    for name in FLAT_PARTITIONS:
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    raise AssertionError(f"{type(optimizer).__name__} holds none of {FLAT_PARTITIONS}: DeepSpeed moved a seam")


def link_optimizer_state(optimizer: Any) -> None:
    """Makes `safe_get_full_optimizer_state` and its setter see the state of every parameter group.

    `_lazy_init_hp_params_optimizer_state` maps fragments to the state of the flat partitions, once. stage_1_and_2.py
    calls it after stepping the first group, when the others have no state yet, and never again: their moments stay
    unreadable. bf16_optimizer.py calls it after all groups; stage3.py looks state up each time and has no such step.
    """
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def is_partitioned(parameter: torch.Tensor) -> bool:
    """True for a parameter of ZeRO-3, which holds no numbers of its own between steps."""
    return hasattr(parameter, "ds_id")


def tied_weights(model: Any) -> list[tuple[torch.Tensor, Any]]:
    """The weights that other pipeline stages hold too, each with the group of their ranks (runtime/pipe/module.py)."""
    return model.get_tied_weights_and_groups() if hasattr(model, "get_tied_weights_and_groups") else []


def is_whole_here(parameter: torch.Tensor) -> bool:
    """False for ZeRO-3's partitioned parameters, but for the small ones that it keeps whole between steps.

    `ds_persist` and `ds_numel` are set in runtime/zero/partition_parameters.py; a parameter that persists is in pieces
    from a write through `GatheredParameters` to its next use.
    """
    return not is_partitioned(parameter) or (parameter.ds_persist and parameter.numel() == parameter.ds_numel)  # type: ignore[attr-defined]


def resident_weights(parameter: torch.Tensor) -> torch.Tensor:
    """The numbers of a parameter that this rank holds between steps: all, or its partition `ds_tensor` (ZeRO-3)."""
    if is_whole_here(parameter):
        return parameter.detach()
    return _without_padding(parameter, parameter.ds_tensor)  # type: ignore[attr-defined]


def fp32_fragment(parameter: torch.Tensor) -> torch.Tensor | None:
    """The fp32 numbers of a parameter that this rank's optimizer updates; None where other ranks update it all.

    `_hp_mapping` is the link to them of ZeRO-1, ZeRO-2 and BF16_Optimizer (utils/tensor_fragment.py). None too where
    they are on NVMe: runtime/zero/stage3.py would swap them in and out among those that it is updating.
    """
    if is_partitioned(parameter):
        if parameter._z3_optimizer.swap_optimizer:  # type: ignore[attr-defined]
            return None
        return _without_padding(parameter, safe_get_local_fp32_param(parameter))
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    return None if mapping is None else mapping.get_hp_fragment()


def _without_padding(parameter: Any, partition: torch.Tensor) -> torch.Tensor:
    """ZeRO-3's partitions are equally long, and nobody writes what lies behind the parameter's end."""
    length, rank = parameter.partition_numel(), torch.distributed.get_rank(parameter.ds_process_group)
    return partition.detach().flatten()[: max(0, parameter.ds_numel - rank * length)]


def own_partition(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a whole value of a ZeRO-3 parameter, zero where the last rank's slice is longer.

    `set_full_hp_param` (runtime/zero/stage3.py) cuts the slice out of the value, but partitions are of equal size:
    where the ranks do not divide the parameter it reads past the end and raises. The setters of local slices work.
    """
    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    start = torch.distributed.get_rank(parameter.ds_process_group) * size  # type: ignore[attr-defined]
    mine = value.flatten()[start : start + size]
    return torch.nn.functional.pad(mine, (0, size - mine.numel()))


def share_fp32_weights(optimizer: Any) -> None:
    """Lets the optimizer update fp32 weights where they are.

    DeepSpeedZeroOptimizer (runtime/zero/stage_1_and_2.py) clones the partition that it updates and copies it over the
    weights after each step; in fp32 the two are equal, and cost their memory twice. Its fragments point into the
    partition, so they are linked anew. An offloaded partition is on another device and stays.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.dtype != torch.float32 or optimizer.cpu_offload:
        return
    for partition, slices, group in zip(
        optimizer.single_partition_of_fp32_groups,
        optimizer.parallel_partitioned_bit16_groups,
        optimizer.real_dp_process_group,
        strict=True,
    ):
        partition.data = slices[torch.distributed.get_rank(group)]
    optimizer._link_all_hp_params()


LOSS_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scaler_state(optimizer: Any) -> dict[str, float]:
    """Where fp16's dynamic loss scale stands (runtime/fp16/loss_scaler.py); empty for other precisions."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {}
    return {name: float(getattr(scaler, name)) for name in LOSS_SCALER_FIELDS}


def set_loss_scaler_state(optimizer: Any, state: dict[str, float]) -> None:
    """Puts fp16's dynamic loss scale back to where it stood; nothing for other precisions."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        for name, value in state.items():
            setattr(scaler, name, type(getattr(scaler, name))(value))
