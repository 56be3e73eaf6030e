"""The cluster of a plan: from a file, a hostfile, numbers on the command line, or this machine. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from launch.errors import LaunchError
from launch.prediction.hardware_catalogue import known_hardware
from launch.prediction.this_machine import describe_machine
from launch.runtime.devices import cpu_count, gpu_count
from launch.runtime.hostfile import read_hostfile
from megalite.config import Config
from megalite.config.auto import PIPELINE
from megalite.config.suggestions import OptionPath, multiples_near
from megalite.planner.hardware import Cluster, ClusterFile, cluster_of, read_cluster
from megalite.planner.search import TENSOR, Check, SearchResult, search

MOST_TRIED = 16  # numbers of ranks on a CPU up to which all are tried; above, only powers of two


def cluster_at(
    file: Path | None, hostfile: Path | None, accelerator: str | None, gpus: int | None, gpus_per_node: int | None
) -> Cluster | None:
    """Builds the cluster that options of a command line describe; None means this machine.

    Raises LaunchError or ConfigError where options contradict each other.
    """
    values = {"--cluster": file, "--hostfile": hostfile, "--gpus": gpus}
    given = [option for option, value in values.items() if value is not None]
    if len(given) > 1:
        raise LaunchError(f"{' and '.join(given)} each say which accelerators there are: give one of them")
    if gpus_per_node is not None and gpus is None:
        raise LaunchError("--gpus-per-node belongs to --gpus: a cluster file and a hostfile say it themselves")
    if accelerator is not None and given in ([], ["--cluster"]):
        wrong = "a cluster file says it itself" if given else "this machine's are looked at"
        raise LaunchError(f"--accelerator belongs to --hostfile or --gpus: {wrong}")
    if file is not None:
        return read_cluster(file, known_hardware())
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
        fewest, most = (extreme(hosts, key=lambda host: host.slots) for extreme in (min, max))
        if fewest.slots != most.slots:
            raise LaunchError(
                f"hostfile {hostfile}: {most.name} has {most.slots} slots and {fewest.name} {fewest.slots}, but a plan "
                f"is for nodes that are alike: use {fewest.slots} slots of each, or only the hosts with {most.slots}"
            )
        return cluster_of_nodes(_kind(accelerator), len(hosts), most.slots, hostfile.name)
    if gpus is not None:
        size = gpus_per_node or min(gpus, 8)
        if gpus % size:
            usual = "" if gpus_per_node else " that nodes usually have"
            raise LaunchError(
                f"--gpus {gpus} is not a multiple of the {size} of a node{usual}: use {multiples_near(gpus, size)}, or "
                "another --gpus-per-node"
            )
        return cluster_of_nodes(_kind(accelerator), gpus // size, size, "as counted")
    return None


def cluster_of_nodes(accelerator: str, nodes: int, per_node: int, name: str) -> Cluster:
    """A cluster of an accelerator in the catalogue."""
    described = ClusterFile(accelerator=accelerator, nodes=nodes, accelerators_per_node=per_node)
    return cluster_of(described, name, known_hardware())


def search_here(config: Config, free: frozenset[OptionPath], check: Check | None = None) -> SearchResult:
    """Searches layouts for this machine: on all GPUs, or as many as a layout can use; on a CPU with the number of ranks
    that is fastest."""
    gpus = gpu_count()
    if gpus:
        return _on_gpus(config, gpus, free, check)
    results = [search(config, here(count), free=free, check=check) for count in _cpu_counts(config, free)]
    # rounded, so that of equally fast layouts the one with the fewest ranks wins
    times = [(float(f"{best.time.seconds:.6g}"), place) for place, one in enumerate(results) if (best := one.best)]
    return results[min(times)[1]] if times else results[-1]


def here(ranks: int) -> Cluster:
    """This machine as a cluster of `ranks` ranks."""
    return describe_machine(ranks).cluster


def shares(slots: Sequence[int], ranks: int) -> tuple[int, int]:
    """Number of nodes, and ranks per node, that stand for hosts with possibly different numbers of slots."""
    per_node = math.gcd(ranks, *slots)
    return ranks // per_node, per_node


def _on_gpus(config: Config, gpus: int, free: frozenset[OptionPath], check: Check | None) -> SearchResult:
    everything = search(config, here(gpus), free=free, check=check)
    if everything.candidates or everything.too_large:
        return everything
    for count in range(gpus - 1, 0, -1):  # refused by rules alone, e.g. a batch that is not divisible
        result = search(config, here(count), free=free, check=check)
        if result.candidates:
            return result
    return everything


def _cpu_counts(config: Config, free: frozenset[OptionPath]) -> list[int]:
    """Numbers of ranks to try; stated sizes may need more of them than there are cores."""
    cores, parallel = cpu_count(), config.parallel
    stated = 1 if parallel.data_parallel_size == "auto" else parallel.data_parallel_size
    stated *= parallel.context_parallel_size
    stated *= 1 if TENSOR in free else parallel.tensor_parallel_size
    stated *= 1 if PIPELINE in free else parallel.pipeline_parallel_size
    few = set(range(1, min(cores, MOST_TRIED) + 1))
    counts = few | {2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores, stated}
    return sorted(count for count in counts if count % stated == 0)


def _kind(accelerator: str | None) -> str:
    if accelerator is not None:
        return accelerator
    if not gpu_count():
        raise LaunchError("nothing says which accelerators the hosts have: add --accelerator, such as H100")
    return describe_machine().name
