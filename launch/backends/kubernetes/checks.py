"""What can be wrong with a run on so many pods before any of them exists. LaunchError or ConfigError, one sentence."""

from __future__ import annotations

from launch.backends.kubernetes.job import Resources
from launch.backends.kubernetes.words import (
    amount,
    cpu_quantity,
    extended_resource,
    image_name,
    is_floating,
    job_name,
    memory_quantity,
    suggested_name,
)
from launch.devices import Device
from launch.errors import LaunchError
from launch.start import check_run
from megalite.config import Config, ResolvedLayout


def check_config(config: Config) -> None:
    """What the ranks would find wrong, where it can be seen from here."""
    check_run(config)
    if not config.checkpoint.resume:
        raise LaunchError("checkpoint.resume is false, so pods that are started again could not go on: set it true")


def layout_on(config: Config, nodes: int, gpus_per_node: int) -> tuple[ResolvedLayout, int, list[str]]:
    """The layout, ranks per node, and what to tell. Raises ConfigError or LaunchError where they do not fit."""
    from launch.plan.automatic import layout_or_likely
    from megalite.planner.search import PIPELINE, TENSOR, Ranks

    device: Device = "cuda" if gpus_per_node else "cpu"
    if not gpus_per_node and {TENSOR, PIPELINE} & config.open:
        raise LaunchError(
            "parallel is auto, so nothing says how many ranks a node has on the CPU: state "
            "parallel.tensor_parallel_size, pipeline_parallel_size and data_parallel_size"
        )
    world_size = nodes * gpus_per_node if gpus_per_node else config.world_size_wanted(None)
    ranks, left_over = divmod(world_size, nodes)
    if left_over or not ranks:
        raise LaunchError(
            f"the layout has {world_size} rank{'s' * (world_size > 1)} on the CPU, which {nodes} nodes cannot share "
            "equally: choose --nodes, or parallel.data_parallel_size, so that they can"
        )
    _, layout, later = layout_or_likely(config, Ranks(world_size, ranks, device))
    tensor = layout.tensor_parallel_size
    notices = [*layout.notices, *later]
    if ranks % tensor:
        notices.append(
            f"tensor parallelism over {tensor} ranks crosses nodes of {ranks}: every layer will wait for the network; "
            "use a parallel.tensor_parallel_size that divides the ranks of a node"
        )
    return layout, ranks, notices


def name_of(name: str | None, config: Config, nodes: int) -> str:
    """The job's name as given, or else the nearest to that of the run's folder."""
    if name is not None:
        return job_name(name, nodes)
    suggestion = suggested_name(config.run_dir.name)
    if not suggestion:
        raise LaunchError(f"run_dir {config.run_dir} gives the job no name: give it one with --name")
    return job_name(suggestion, nodes)


def image_of(image: str) -> tuple[str, list[str]]:
    """The image, and what to tell."""
    if is_floating(image_name(image)):
        return image, [f"--image {image} can be another image tomorrow, or on another node: give it a tag or a digest"]
    return image, []


def resources_of(cpu: str | None, memory: str | None, shared_memory: str | None, rdma: str | None) -> Resources:
    """As they were typed, checked."""
    if shared_memory is not None and memory is not None:
        inside, whole = amount(shared_memory, "--shared-memory"), amount(memory, "--memory")
        if inside > whole:
            raise LaunchError(
                f"--shared-memory {shared_memory} is more than --memory {memory}, of which it is a part: raise --memory"
            )
    return Resources(
        cpu=None if cpu is None else cpu_quantity(cpu),
        memory=None if memory is None else memory_quantity(memory, "--memory"),
        shared_memory=None if shared_memory is None else memory_quantity(shared_memory, "--shared-memory"),
        rdma=None if rdma is None else extended_resource(rdma),
    )
