"""Time of collectives and sends on a cluster's links. Pure arithmetic, no torch.

Ranks are dealt to nodes in order: tensor-parallel neighbours are adjacent, then ranks that share sequences, then
replicas, stages are furthest apart
(megalite/parallel/mesh.py). NCCL's figures for large messages are some 75 % of NVLink's bandwidth on the data sheet
and 80 % of a network adapter's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.planner.cost.communication_volumes import Moved
from megalite.planner.hardware import Cluster
from megalite.planner.workload import ParallelLayout, TrainingWorkload

INTRA_NODE_EFFICIENCY = 0.75
INTER_NODE_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Ring:
    """A group of ranks that exchange bytes around a ring."""

    ranks: int
    bytes_per_s: float  # from each rank to the next
    latency_s: float  # of each message
    leaves_node: bool = False
    exchange_s: float = 0.0  # of each byte of an all-to-all, which goes straight to its rank

    def seconds(self, moved: Moved, collectives: int = 1) -> float:
        """Returns the seconds of `collectives` of each kind that move these bytes of a rank: n - 1 messages each,
        twice as many for an all-reduce."""
        if self.ranks == 1:
            return 0.0
        exchanged_s, around = moved.all_to_all * self.exchange_s, replace(moved, all_to_all=0)
        kinds = 2 * (moved.all_reduce > 0) + (moved.reduce_scatter > 0) + (moved.all_gather > 0)
        kinds += (moved.all_to_all > 0) + (moved.broadcast > 0) + (moved.send > 0)
        sent_s = around.per_link(self.ranks) / self.bytes_per_s + exchanged_s
        return sent_s + collectives * kinds * (self.ranks - 1) * self.latency_s


def tensor_ring(layout: ParallelLayout, cluster: Cluster) -> Ring:
    """Returns the ring of a tensor-parallel group: adjacent ranks."""
    return _ring(layout.tensor_parallel_size, 1, cluster)


def context_ring(layout: ParallelLayout, cluster: Cluster) -> Ring:
    """Returns the ring of a context-parallel group: neighbours among every tensor_parallel_size-th rank."""
    return _ring(layout.context_parallel_size, layout.tensor_parallel_size, cluster)


def data_ring(layout: ParallelLayout, cluster: Cluster) -> Ring:
    """Returns the ring of the copies of a weight: every tensor_parallel_size-th rank."""
    return _ring(layout.replicas, layout.tensor_parallel_size, cluster)


def expert_ring(job: TrainingWorkload, cluster: Cluster) -> Ring:
    """Returns the ring of the ranks that experts are dealt over."""
    layout, stack = job.layout, job.stack
    ranks, stride = layout.expert_parallel_size, layout.tensor_parallel_size
    if stack.folds_experts:
        ranks, stride = ranks * stride, 1
    ring = _ring(ranks, stride, cluster)
    if ring.leaves_node and stack.sends_once_per_node:
        members = max(1, cluster.accelerators_per_node // stride)
        nodes, chosen = ranks / members, job.model.num_experts_per_tok
        met = (nodes - 1) * (1 - (1 - 1 / nodes) ** chosen) / chosen  # other nodes with one of a token's experts
        inside_s = (members - 1) / members / _inside_bytes_per_s(cluster)
        ring = replace(ring, exchange_s=max(inside_s, met / _own_bytes_per_s(cluster)))
    return ring


def expert_data_ring(layout: ParallelLayout, cluster: Cluster) -> Ring:
    """Returns the ring of the copies of an expert."""
    return _ring(layout.expert_replicas, layout.tensor_parallel_size * layout.expert_parallel_size, cluster)


def end_ring(layout: ParallelLayout, cluster: Cluster) -> Ring:
    """Returns the ring of the first and the last stage's rank, which both hold a tied embedding."""
    pair = layout.world_size - layout.tensor_parallel_size * layout.replicas + 1
    return replace(_ring(pair, 1, cluster), ranks=min(2, layout.pipeline_parallel_size))


def boundary_s(sent_bytes: float, gathered_bytes: float, layout: ParallelLayout, cluster: Cluster) -> float:
    """Returns the seconds from one stage to the next: every rank sends `sent_bytes`, then each tensor-parallel ring
    gathers `gathered_bytes` if tensors are cut for the transfer."""
    leaves_node = layout.world_size > cluster.accelerators_per_node
    senders = min(cluster.accelerators_per_node, layout.tensor_parallel_size * layout.replicas)
    share = min(1.0, cluster.adapters_per_node / senders)  # of an adapter: a stage's ranks in a node send together
    outside = cluster.inter_node.gb_per_s * 1e9 * INTER_NODE_EFFICIENCY * share
    sent = sent_bytes / (outside if leaves_node else _inside_bytes_per_s(cluster))
    latency_s = (cluster.inter_node if leaves_node else cluster.intra_node).latency_us * 1e-6
    return sent + latency_s + tensor_ring(layout, cluster).seconds(Moved(all_gather=round(gathered_bytes)))


def _ring(ranks: int, stride: int, cluster: Cluster) -> Ring:
    per_node, span = cluster.accelerators_per_node, ranks * stride
    if per_node % span == 0 or ranks == 1:  # else some group begins in one node and ends in another
        inside = _inside_bytes_per_s(cluster)
        return Ring(ranks, inside, cluster.intra_node.latency_us * 1e-6, exchange_s=(ranks - 1) / ranks / inside)
    # all members in a node pass their bytes on through adapters that they share with the other groups of the node;
    # where groups and nodes do not fit, some group has a single member in a node
    members = max(1, per_node // stride) if span % per_node == 0 else 1
    own, inside = _own_bytes_per_s(cluster), _inside_bytes_per_s(cluster)
    # of an all-to-all each member sends its own bytes through its own share of the adapters
    exchange_s = max((ranks - members) / own, (members - 1) / inside) / ranks
    latency_s = cluster.inter_node.latency_us * 1e-6
    return Ring(ranks, min(own * members, inside), latency_s, leaves_node=True, exchange_s=exchange_s)


def _own_bytes_per_s(cluster: Cluster) -> float:
    """Returns an accelerator's part of its node's adapters."""
    share = cluster.adapters_per_node / cluster.accelerators_per_node
    return cluster.inter_node.gb_per_s * 1e9 * INTER_NODE_EFFICIENCY * share


def _inside_bytes_per_s(cluster: Cluster) -> float:
    return cluster.intra_node.gb_per_s * 1e9 * INTRA_NODE_EFFICIENCY
