"""Resolves the layout of a config on a number of processes: how many ranks each kind of parallelism gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.config.auto import PLACEHOLDERS
from megalite.config.base import Device
from megalite.config.config import Config
from megalite.config.errors import ConfigError
from megalite.config.rules.context import context_parallel_kind
from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.config.rules.rules import check_rules
from megalite.config.sections import ContextParallelKind, OffloadConfig, ParallelConfig, PipelineSchedule
from megalite.config.suggestions import dotted

ZERO_STAGE_0_NOTICE = (
    "zero_stage 0 is served by stage 1: DeepSpeed's stage 0 clips by a wrong norm under tensor or pipeline "
    "parallelism and shifts Adam's bias correction in bf16"
)

CPU_OFFLOAD_NOTICE = (
    "offload is for GPUs: on a CPU, whose memory is the host's, it gains nothing, and the same code copies within that "
    "memory"
)


@dataclass(frozen=True)
class ResolvedLayout:
    """The layout a run has on a given number of processes."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    context_parallel_size: int
    context_parallel_kind: ContextParallelKind
    expert_parallel_size: int
    world_size: int
    gradient_accumulation_steps: int  # micro-batches per optimizer step on one replica
    zero_stage: int  # that DeepSpeed runs: 1 to 3
    pipeline_schedule: PipelineSchedule
    pipeline_chunks: int  # pieces of the model on each pipeline stage
    notices: tuple[str, ...]  # settings that are replaced by others, one sentence each; logged once at start

    @property
    def replicas(self) -> int:
        """Copies of the weights, over which gradients are summed and ZeRO cuts."""
        return self.data_parallel_size * self.context_parallel_size


def resolve_layout(config: Config, world_size: int, device: Device) -> ResolvedLayout:
    """Returns the layout on `world_size` processes.

    Raises ConfigError if the layout is still `auto`, if the sizes do not multiply to `world_size`, or if the config
    breaks a rule with this many replicas on this device.
    """
    if config.unresolved_options:
        names = ", ".join(dotted(path) for path in PLACEHOLDERS if path in config.unresolved_options)
        raise ConfigError(
            f"the layout is not chosen yet ({names}: auto): `megalite plan "
            "CONFIG.yaml --write FILE.yaml` chooses one and writes a config with it"
        )
    layout = unchecked_layout(config, world_size)
    check_rules(config, layout.data_parallel_size, device)
    if device == "cpu" and config.offload != OffloadConfig():
        return replace(layout, notices=(*layout.notices, CPU_OFFLOAD_NOTICE))
    return layout


def unchecked_layout(config: Config, world_size: int) -> ResolvedLayout:
    """Returns the layout on `world_size` processes without checking any rule but that the sizes multiply to it."""
    parallel, training = config.parallel, config.training
    data_parallel_size = _data_parallel_size(parallel, world_size)
    return ResolvedLayout(
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        context_parallel_kind=context_parallel_kind(config),
        expert_parallel_size=parallel.expert_parallel_size,
        world_size=world_size,
        gradient_accumulation_steps=training.global_batch_size // (training.micro_batch_size * data_parallel_size),
        zero_stage=max(1, parallel.zero_stage),
        pipeline_schedule=parallel.pipeline_schedule,
        pipeline_chunks=parallel.pipeline_chunks or FEWEST_CHUNKS[parallel.pipeline_schedule],
        notices=(ZERO_STAGE_0_NOTICE,) if parallel.zero_stage == 0 else (),
    )


def wanted_world_size(config: Config, device_count: int | None) -> int:
    """Returns the number of processes to start on a machine with `device_count` GPUs (None: CPU ranks).

    It is tp x pp x cp x dp; a dp of `auto` fills the GPUs and is 1 on a CPU.
    """
    parallel = config.parallel
    replica, dp = parallel.ranks_per_replica, parallel.data_parallel_size
    if dp != "auto":
        return replica * dp
    if device_count is None:
        return replica
    if device_count < replica:
        raise ConfigError(
            f"{_sizes(parallel)} needs {replica} GPUs, but this machine has {device_count}: use sizes whose product is "
            f"at most {device_count}, or a hostfile with more machines"
        )
    return device_count // replica * replica


def _sizes(parallel: ParallelConfig) -> str:
    """Returns `parallel.tensor_parallel_size 2 x ...` of the axes within a replica."""
    options = ["tensor_parallel_size", "pipeline_parallel_size"]
    options += ["context_parallel_size"] * (parallel.context_parallel_size > 1)
    return " x ".join(f"parallel.{option} {getattr(parallel, option)}" for option in options)


def _data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    replica, dp = parallel.ranks_per_replica, parallel.data_parallel_size
    fitting, left_over = divmod(world_size, replica)
    if dp == "auto":
        if left_over:
            below = f"{fitting * replica} or " if fitting else ""
            raise ConfigError(
                f"{_sizes(parallel)} = {replica} does "
                f"not divide the {world_size} processes of this run: start {below}{(fitting + 1) * replica}"
            )
        return fitting
    if replica * dp != world_size:
        instead = "" if left_over else f", or set parallel.data_parallel_size to {fitting} or auto"
        raise ConfigError(
            f"{_sizes(parallel)} x parallel.data_parallel_size "
            f"{dp} makes {replica * dp} process{'es' * (replica * dp > 1)}, but this run has {world_size}: start "
            f"{replica * dp}{instead}"
        )
    return dp
