"""Uses of private parts of ZeRO-3, which are in runtime/zero/stage3.py of DeepSpeed 0.19.8 where nothing else is said.

A test in test_internals.py or test_deepspeed_accumulation.py fails when such a part moves.
"""

from __future__ import annotations

from typing import Any

import torch


def let_stages_differ() -> None:
    """Keeps ZeRO-3 from comparing the order of modules and parameters over all ranks, of which stages have others.

    `reset_step` (runtime/zero/partitioned_param_coordinator.py) does it at every forward of the engine, over the world:
    ranks of another stage would fail or wait forever. Replicas of a stage run the same table; comparing them alone
    would make every hand-over wait for the device.
    """
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda _: None


def partitioned_groups(optimizer: Any) -> list[list[tuple[torch.nn.Parameter, torch.Size, int]]]:
    """Returns ZeRO-3's sub-groups, in the order of its flat fp32 partitions: parameters, their shapes and the numbers
    of each that a rank owns, padding included (runtime/zero/stage3.py)."""
    return [[(each, each.ds_shape, each.partition_numel()) for each in group] for group in optimizer.fp16_groups]


def begin_zero_3_step(optimizer: Any) -> None:
    """Does what ZeRO-3's step begins with: whole weights are freed. DeepSpeed hands partitions to the optimizer one
    by one, as is needed on NVMe alone: here it gets all of them."""
    optimizer._pre_step()
    optimizer._partition_all_parameters()
    if not optimizer.swap_optimizer:
        for group in optimizer.optimizer.param_groups:
            group["params"] = []
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[number]]["params"].append(flat)


def step_from_nvme(optimizer: Any, number: int, gradient: torch.Tensor) -> None:
    """Updates one of ZeRO-3's sub-groups, whose optimizer state is fetched from NVMe and brought back there."""
    optimizer._prepare_sub_group(number, set())
    flat = optimizer.fp32_partitioned_groups_flat[number]
    flat.grad = gradient.to(flat.device)
    optimizer._optimizer_step(number)
    optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer._release_sub_group(number, set())


def end_zero_3_step(optimizer: Any) -> None:
    """Does what ZeRO-3's step ends with: partitions in the format of the model get the new weights, and small weights
    that persist are gathered."""
    if not optimizer.swap_optimizer:
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer._post_step(set())
