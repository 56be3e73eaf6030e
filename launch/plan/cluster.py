"""Which cluster a plan is for: described in a file, listed in a hostfile, counted on the command line, or this machine.

No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.devices import cpu_count, gpu_count
from launch.errors import LaunchError
from launch.hostfile import Host, read_hostfile
from launch.plan.this_machine import describe_machine
from launch.plan.user_hardware import known_hardware
from megalite.config import Config
from megalite.config.nearest import OptionPath
from megalite.config.remedies import multiples_near
from megalite.planner.hardware import Cluster, ClusterFile, cluster_of, read_cluster
from megalite.planner.search import PIPELINE, TENSOR, Check, SearchResult, search

MOST_TRIED = 16  # numbers of ranks on a CPU that are all tried; of more only powers of two


@dataclass(frozen=True)
class Where:
    """What the command line says about the cluster."""

    file: Path | None = None
    hostfile: Path | None = None
    accelerator: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None


def cluster_at(where: Where) -> Cluster | None:
    """None for this machine. Raises LaunchError or ConfigError, one sentence, where it cannot be told."""
    told = {"--cluster": where.file, "--hostfile": where.hostfile, "--gpus": where.gpus}
    given = [option for option, value in told.items() if value is not None]
    if len(given) > 1:
        raise LaunchError(f"{' and '.join(given)} each say which accelerators there are: give one of them")
    if where.gpus_per_node is not None and where.gpus is None:
        raise LaunchError("--gpus-per-node belongs to --gpus: a cluster file and a hostfile say it themselves")
    if where.accelerator is not None and given in ([], ["--cluster"]):
        wrong = "a cluster file says it itself" if given else "this machine's are looked at"
        raise LaunchError(f"--accelerator belongs to --hostfile or --gpus: {wrong}")
    if where.file is not None:
        return read_cluster(where.file, known_hardware())
    if where.hostfile is not None:
        hosts = read_hostfile(where.hostfile)
        return nodes_of(_kind(where.accelerator), len(hosts), _equal_slots(where.hostfile, hosts), where.hostfile.name)
    if where.gpus is not None:
        nodes, per_node = counted(where.gpus, where.gpus_per_node)
        return nodes_of(_kind(where.accelerator), nodes, per_node, "as counted")
    return None


def nodes_of(accelerator: str, nodes: int, per_node: int, name: str) -> Cluster:
    """A cluster of what is in the catalogue."""
    described = ClusterFile(accelerator=accelerator, nodes=nodes, accelerators_per_node=per_node)
    return cluster_of(described, name, known_hardware())


def counted(gpus: int, per_node: int | None) -> tuple[int, int]:
    """Nodes, and accelerators of each. Raises LaunchError where they cannot be equal."""
    size = per_node or min(gpus, 8)
    if gpus % size:
        usual = "" if per_node else " that nodes usually have"
        raise LaunchError(
            f"--gpus {gpus} is not a multiple of the {size} of a node{usual}: use {multiples_near(gpus, size)}, or "
            "another --gpus-per-node"
        )
    return gpus // size, size


def search_here(config: Config, free: frozenset[OptionPath], check: Check | None = None) -> SearchResult:
    """On this machine: on all its GPUs, or as many as a layout can use; on a CPU in as many ranks as is fastest."""
    gpus = gpu_count()
    if gpus:
        return _on_gpus(config, gpus, free, check)
    results = [search(config, here(count), free=free, check=check) for count in _cpu_counts(config, free)]
    working = [result for result in results if result.best is not None]
    return min(working, key=_seconds_of_best, default=results[-1])


def here(ranks: int) -> Cluster:
    """This machine with so many ranks."""
    return describe_machine(ranks).cluster


def shares(slots: Sequence[int], ranks: int) -> tuple[int, int]:
    """Nodes, and ranks of each, that stand for hosts which may have different numbers of slots."""
    per_node = math.gcd(ranks, *slots)
    return ranks // per_node, per_node


def _on_gpus(config: Config, gpus: int, free: frozenset[OptionPath], check: Check | None) -> SearchResult:
    everything = search(config, here(gpus), free=free, check=check)
    if everything.candidates or everything.too_large:
        return everything
    for count in range(gpus - 1, 0, -1):  # rules alone refuse them: the batch, say, cannot be cut in so many
        result = search(config, here(count), free=free, check=check)
        if result.candidates:
            return result
    return everything


def _cpu_counts(config: Config, free: frozenset[OptionPath]) -> list[int]:
    """Numbers of ranks that are worth a try; sizes that are stated may need more of them than there are cores."""
    cores, parallel = cpu_count(), config.parallel
    stated = 1 if parallel.data_parallel_size == "auto" else parallel.data_parallel_size
    stated *= 1 if TENSOR in free else parallel.tensor_parallel_size
    stated *= 1 if PIPELINE in free else parallel.pipeline_parallel_size
    few = set(range(1, min(cores, MOST_TRIED) + 1))
    counts = few | {2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores, stated}
    return sorted(count for count in counts if count % stated == 0)


def _seconds_of_best(result: SearchResult) -> float:
    assert result.best is not None
    return float(f"{result.best.time.seconds:.6g}")


def _kind(accelerator: str | None) -> str:
    if accelerator is not None:
        return accelerator
    if not gpu_count():
        raise LaunchError("which accelerators the hosts have is not said: add --accelerator, such as H100")
    return describe_machine().name


def _equal_slots(hostfile: Path, hosts: Sequence[Host]) -> int:
    fewest, most = (extreme(hosts, key=lambda host: host.slots) for extreme in (min, max))
    if fewest.slots != most.slots:
        raise LaunchError(
            f"hostfile {hostfile}: {most.name} has {most.slots} slots and {fewest.name} {fewest.slots}, but a plan is "
            f"for nodes that are alike: use {fewest.slots} slots of each, or only the hosts with {most.slots}"
        )
    return most.slots
