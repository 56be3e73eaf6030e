"""Uses of private parts of DeepSpeed and torch, each with the file of DeepSpeed 0.19.8 that it depends on.

Two groups: ZeRO's partitions; imports and process groups. Those that each step enters are in step.py, fp16's loss scale
in loss_scale.py. A test in test_internals.py, or in test_deepspeed_accumulation.py about gradients, fails when such a
part moves or the defect behind it is gone. No other module touches a private name of DeepSpeed.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import torch
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

# ZeRO's partitions


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
    """Returns True for a parameter of ZeRO-3, which holds no values of its own between steps."""
    return hasattr(parameter, "ds_id")


def is_whole_here(parameter: torch.Tensor) -> bool:
    """Returns False for ZeRO-3's partitioned parameters, except the small ones that it keeps whole between steps.

    `ds_persist` and `ds_numel` are set in runtime/zero/partition_parameters.py; a parameter that persists is in pieces
    from a write through `GatheredParameters` to its next use.
    """
    return not is_partitioned(parameter) or (parameter.ds_persist and parameter.numel() == parameter.ds_numel)  # type: ignore[attr-defined]


def is_swapped(parameter: torch.Tensor) -> bool:
    """Returns whether ZeRO-3 keeps the optimizer's values of a parameter on NVMe (runtime/zero/stage3.py)."""
    return is_partitioned(parameter) and bool(parameter._z3_optimizer.swap_optimizer)  # type: ignore[attr-defined]


def own_range(parameter: torch.Tensor) -> tuple[int, int]:
    """Returns the range [start, stop) of the flattened local parameter that this rank's optimizer updates; or (0, 0).

    `_hp_mapping` links to them in ZeRO-1, ZeRO-2 and BF16_Optimizer (utils/tensor_fragment.py); ZeRO-3's
    partitions are equally long, and what lies behind the parameter's end is never written.
    """
    if is_partitioned(parameter):
        length = parameter.partition_numel()  # type: ignore[attr-defined]
        start = length * torch.distributed.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
        size = parameter.ds_numel  # type: ignore[attr-defined]
        return (min(start, size), min(start + length, size))
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return (0, 0)
    address = mapping.lp_fragment_address
    return (address.start, address.start + address.numel)


def _without_padding(parameter: Any, partition: torch.Tensor) -> torch.Tensor:
    start, stop = own_range(parameter)
    return partition.detach().flatten()[: stop - start]


def resident_weights(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the values of a parameter that this rank holds between steps: all, or ZeRO-3's partition `ds_tensor`."""
    if is_whole_here(parameter):
        return parameter.detach()
    return _without_padding(parameter, parameter.ds_tensor)  # type: ignore[attr-defined]


def unreplicated_partition(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns this rank's values of a ZeRO-3 parameter if no other copy of them has to be kept equal.

    None if there is such a copy: whole parameters, hpZ's second partition `ds_secondary_tensor`, a partition on NVMe
    (runtime/zero/partition_parameters.py).
    """
    if is_whole_here(parameter) or parameter.ds_secondary_tensor is not None:  # type: ignore[attr-defined]
        return None
    partition = parameter.ds_tensor  # type: ignore[attr-defined]
    return None if partition.final_location == "nvme" else _without_padding(parameter, partition)


def owned_fp32_values(parameter: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns the fp32 `weight`, or the moment `kind`, of `own_range`, flat and in place; from NVMe a copy.

    ZeRO-3: `_get_fp32_opt_state_partition` of runtime/zero/stage3.py.
    """
    moment = None if kind == "weight" else kind
    if not is_partitioned(parameter):
        return parameter._hp_mapping.get_hp_fragment(moment).detach()  # type: ignore[attr-defined]
    start, stop = own_range(parameter)
    optimizer = parameter._z3_optimizer  # type: ignore[attr-defined]
    if optimizer.swap_optimizer:  # from NVMe, through a buffer
        read = (
            safe_get_local_fp32_param
            if moment is None
            else partial(safe_get_local_optimizer_state, optim_state_key=moment)
        )
        partition = read(parameter)
    else:  # the public getters copy an offloaded partition to the device, which has no room for all of them
        partition, _ = optimizer._get_fp32_opt_state_partition(parameter, True, moment)
    return partition.detach().flatten()[: stop - start]


def fp32_fragment(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the weight's `owned_fp32_values` while an optimizer is stepping; None if this rank updates none of them,
    or nobody does.

    None too if they are on NVMe: runtime/zero/stage3.py would swap them in and out among those that it is updating.
    """
    if not parameter.requires_grad:
        return None
    if is_partitioned(parameter):
        return None if is_swapped(parameter) else owned_fp32_values(parameter, "weight")
    start, stop = own_range(parameter)
    return owned_fp32_values(parameter, "weight") if stop > start else None


def share_fp32_weights(optimizer: Any) -> None:
    """Lets the optimizer update fp32 weights in place.

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


def accept_fp16_on_cpus() -> None:
    """Makes DeepSpeed's engine take fp16 on a CPU without units for it, whose products our layers widen.

    runtime/engine.py asks `CPU_Accelerator`, and that asks oneDNN (accelerator/cpu_accelerator.py).
    """
    import deepspeed.accelerator.cpu_accelerator as accelerator

    accelerator.CPU_Accelerator.is_fp16_supported = lambda _: True


class FlatGroup(NamedTuple):
    """One group of ZeRO-1 or ZeRO-2: its parameters are views of one flat tensor, cut evenly over `replicas`."""

    parameters: list[torch.nn.Parameter]
    weights: torch.Tensor  # flat, with padding at its end
    replicas: torch.distributed.ProcessGroup  # that hold them
    gradients: torch.Tensor | None = None  # BF16_Optimizer's fp32 sums, as long as `weights` and always there

    def start(self, parameter: torch.Tensor) -> int:
        """Returns the index of a parameter's first element in the flat tensor."""
        return (parameter.data_ptr() - self.weights.data_ptr()) // self.weights.element_size()


def flat_groups(optimizer: Any) -> list[FlatGroup]:
    """Returns the parameter groups of ZeRO-1 and ZeRO-2, in the order of the torch optimizer's."""
    replicas = optimizer.real_dp_process_group
    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        gradients = optimizer.fp32_groups_gradients_flat
        rows = zip(optimizer.bf16_groups, optimizer.bf16_groups_flat, replicas, gradients, strict=True)
        return [FlatGroup(*row) for row in rows]
    return [FlatGroup(*row) for row in zip(optimizer.bit16_groups, optimizer.bit16_groups_flat, replicas, strict=True)]


@contextmanager
def dealt_groups_cut_over(replicas: Any) -> Iterator[None]:
    """Makes the optimizers of ZeRO-1 and ZeRO-2 that are built in the `with` cut parameter groups that say `is_dealt`
    over the process group `replicas`, and the others over all replicas.

    Both keep a process group for each parameter group, which DeepSpeed's own layers of experts may change, in a list
    that they set before they cut anything (runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py).
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    name, kinds = "real_dp_process_group", (DeepSpeedZeroOptimizer, bf16_optimizer.BF16_Optimizer)

    def keep(optimizer: Any, usual: list[Any]) -> None:
        is_dealt = [group.get("is_dealt") for group in optimizer.optimizer.param_groups]
        vars(optimizer)[name] = [replicas if dealt else each for dealt, each in zip(is_dealt, usual, strict=True)]

    for kind in kinds:
        setattr(kind, name, property(lambda optimizer: vars(optimizer)[name], keep))
    try:
        yield
    finally:
        for kind in kinds:
            delattr(kind, name)


def keep_apart(parameter: torch.nn.Parameter) -> None:
    """Keeps DeepSpeed's engine from making a parameter equal on all replicas, which hold other numbers of it.

    `_broadcast_model` (runtime/engine.py) leaves out those of OptimizedLinear, which it knows by this attribute.
    """
    parameter.ds_optim_param = True  # type: ignore[attr-defined]


def take_over_reduction(engine: Any) -> None:
    """Makes DeepSpeed leave gradients to us: it neither reduces them, for which `enable_backward_allreduce` is and the
    hooks of its optimizers, nor looks for them in `finalize_gradient_accumulation_boundary`, nor writes zeros over
    BF16_Optimizer's sums. Buffers of an offloaded optimizer for them go, of which `contiguous_gradients` would make one
    in each backward, and ZeRO-3's, as long as this rank's partitions.
    """
    optimizer = engine.optimizer
    engine.enable_backward_allreduce = False
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        optimizer.clear_hp_grads = lambda: None
    optimizer.finalize_gradient_accumulation_boundary = lambda: None
    if getattr(optimizer, "cpu_offload", False):
        optimizer.contiguous_gradients, optimizer.param_buffer_of_bit16_for_cpu_offload_groups = False, []
        optimizer.temp_grad_buffer_for_cpu_offload = optimizer.temp_grad_buffer_for_gpu_offload = None
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        optimizer.grad_partitions_flat_buffer = None
        optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.clear()


# Imports, output and process groups


def keep_collective_uncompiled() -> None:
    """Keeps DeepSpeed from compiling its shared-memory CPU collective inside `init_distributed`.

    comm/torch.py builds `deepspeed_shm_comm` on every CPU start: 50 s of compiler, a failure where there is no
    compiler, and an endless wait where a killed run left its build lock behind. Only `inference_all_reduce` uses it.
    It asks a table that ops/__init__.py would fill with all operators when it is first read, by running compilers.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}


def use_cpu_adam(library: Any) -> None:
    """Makes `DeepSpeedCPUAdam` use a loaded library instead of compiling one, which `OpBuilder.load` does otherwise.

    `_loaded_ops` of ops/op_builder/builder.py holds what a process has loaded, by name.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder._loaded_ops[CPUAdamBuilder.NAME] = library


def keep_muon_uncompiled() -> None:
    """Keeps DeepSpeed's Muon from importing torch's compiler on every rank: 1.4 s of CPU and 60 MB for nothing.

    Every ZeRO optimizer imports the module to ask whether it was handed a Muon, and the module compiles its kernels as
    it is imported (runtime/zero/muon/original_muon.py). So it is imported once with the compiling decorator disabled.
    """
    import deepspeed.runtime.compiler as compiler

    decorator = compiler.compile
    compiler.compile = lambda *_, **__: lambda kernel: kernel
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = decorator


def quiet_logging() -> None:
    """Limits DeepSpeed's log to warnings and errors, except three that say nothing new.

    It calls ZeRO with a plain torch optimizer "untested" (runtime/engine.py): our parity tests run exactly that. It
    says that it skips a step (runtime/fp16/loss_scaler.py): so does a guard, with the reason. It calls two collectives
    by names that torch 2.13 deprecates, with a warning per call site and rank, and under ZeRO-3 on one GPU a barrier,
    for which torch says that it takes the device in use.
    """
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    known = ("untested optimizer", "OVERFLOW! Skipping step")
    logger.addFilter(lambda record: not any(text in record.getMessage() for text in known))
    warnings.filterwarnings("ignore", message=".*torch.distributed.*_tensor` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")


def process_groups() -> list[Any]:
    """Returns all process groups of this rank: the keys of torch's `_world.pg_map`.

    (torch/distributed/distributed_c10d.py, torch 2.13)
    """
    return list(torch.distributed.distributed_c10d._world.pg_map)


def timeout_of(group: Any) -> timedelta:
    """Returns the shortest timeout of the group's backends; on GPUs it may have one for the CPU too."""
    backends = [group._get_backend(device) for device in group._device_types]
    return min(backend.options._timeout for backend in backends)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Sets the timeout of collectives that begin from now on; torch supports gloo and NCCL, and warns of others."""
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)
