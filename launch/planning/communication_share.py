"""Predicts the share of a step in which GPUs wait for communication, on several numbers of GPUs. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from launch.errors import LaunchError
from launch.planning.cluster import nodes_of
from megalite.config import Config, resolve_layout
from megalite.config.suggestions import multiples_near
from megalite.planner.cost.step_time import step_time
from megalite.planner.workload import TrainingWorkload

COMMUNICATION = ("tensor collectives", "between stages", "replicas")  # of `StepTime.parts`


def predicted_share(config: Config, accelerator: str, gpus_per_node: int) -> Callable[[int], float]:
    """Returns a function from the number of GPUs to the share; only the number of replicas changes with it.

    Each replica keeps the samples that the config gives it; where `parallel.data_parallel_size` is auto, the replicas
    share `training.global_batch_size`. The function raises LaunchError
    or ConfigError where the config cannot run on that number.
    """

    def share(gpus: int) -> float:
        step = step_time(_job(config, gpus), nodes_of(accelerator, gpus // gpus_per_node, gpus_per_node, "as counted"))
        return sum(step.parts[part] for part in COMMUNICATION) / step.seconds

    return share


def _job(config: Config, gpus: int) -> TrainingWorkload:
    parallel = config.parallel
    if parallel.data_parallel_size == "auto":
        return TrainingWorkload.of(config, resolve_layout(config, gpus, "cuda"))
    replica = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    there = parallel.data_parallel_size
    job = TrainingWorkload.of(config, resolve_layout(config, replica * there, "cuda"))
    if gpus % replica:
        raise LaunchError(
            f"--gpus {gpus}: a replica of the model takes {replica} GPUs (tensor x pipeline): use "
            f"{multiples_near(gpus, replica)}"
        )
    replicas = gpus // replica
    return replace(
        job,
        layout=replace(job.layout, data_parallel_size=replicas),
        global_batch_size=job.global_batch_size // there * replicas,
    )
