"""Memory and time of what waits on the host: the optimizer's state (ZeRO-Offload, Ren 2021), and activations.

Copies of activations run behind computing, as far as that takes as long (megalite/parallel/activation_offload.py). The
optimizer's are not hidden: gradients go down after the last backward, and weights come back after the update. On a CPU
there is one memory, which holds both sides of each copy. Pure arithmetic, no torch.
"""

from __future__ import annotations

from megalite.planner.cost.model_states import MOMENTS
from megalite.planner.hardware import Cluster, find_link
from megalite.planner.workload import BYTES, TrainingWorkload

BLOCKS_OF_A_PASS = 2  # on the device at once: the one that computes, and its neighbour on the way out or back
LINK_EFFICIENCY = 0.8  # part of a link's bandwidth that pinned memory reaches: a usual value, not fitted
# bandwidth of the host's memory for one accelerator: two sockets with eight channels of DDR4-3200 for eight (DGX A100)
HOST_MEMORY_BYTES_PER_S = 2 * 8 * 25.6e9 / 8


def activations_on_device(
    job: TrainingWorkload, all_bytes: float, block_bytes: float, received_bytes: float = 0.0
) -> float:
    """Returns the bytes on a GPU of activations that are `all_bytes` in all, `block_bytes` of the largest block, and
    `received_bytes` of other stages. A pipeline's passes alternate, so blocks are on the way in both directions."""
    passes = 1 if job.layout.pipeline_parallel_size == 1 else 2
    return min(all_bytes, passes * BLOCKS_OF_A_PASS * block_bytes + received_bytes)


def optimizer_on_host(job: TrainingWorkload, owned: float) -> float:
    """Returns the host's bytes for the optimizer of a rank that owns so many numbers: fp32 weights, moments and
    gradients."""
    return 4 * (MOMENTS[job.optimizer] + 2) * owned


def host_link_bytes_per_s(cluster: Cluster) -> float:
    """Returns the bandwidth in each direction between a GPU and its host."""
    return LINK_EFFICIENCY * find_link(cluster.accelerator.host_link).gb_per_s * 1e9


def exposed_copies_s(
    cluster: Cluster, kept_bytes: float, passes_s: tuple[float, float], memory_bytes_per_s: float
) -> float:
    """Returns the seconds that moving a micro-batch's activations of one stage adds to its forward and backward passes,
    which take `passes_s`."""
    if cluster.accelerator.device == "cpu":  # each copy reads and writes
        return 2 * 2 * kept_bytes / memory_bytes_per_s
    copy_s = kept_bytes / host_link_bytes_per_s(cluster)
    return sum(max(0.0, copy_s - pass_s) for pass_s in passes_s)


def host_update_s(job: TrainingWorkload, cluster: Cluster, numbers: float, update_bytes: float) -> float:
    """Returns the seconds of an update on the host of so many numbers, which moves `update_bytes` of each through the
    host's memory: fp32 gradients go down, and weights come back."""
    copies = (4 + BYTES[job.dtype]) * numbers
    return copies / host_link_bytes_per_s(cluster) + update_bytes * numbers / HOST_MEMORY_BYTES_PER_S
