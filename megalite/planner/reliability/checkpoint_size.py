"""Size of a checkpoint and the time to write it. Pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megalite.planner.cost.model_states import MOMENTS
from megalite.planner.reliability.checkpoint_interval import Save


class Contents(StrEnum):
    """Tensors that a checkpoint holds of each parameter."""

    MASTERS = "masters"
    """fp32 weights and both Adam moments, 4 + 4 + 4: what megalite writes. The weights in half precision are these,
    rounded, so they are not stored (docs/checkpoints.md)."""

    MIXED = "mixed"
    """Half-precision weights beside the three fp32 tensors, 2 + 4 + 4 + 4: what many stacks and worked examples
    count."""

    GRADIENTS = "gradients"
    """The three fp32 tensors and fp32 gradients, 4 + 4 + 4 + 4: everything that a step in fp32 leaves behind. With
    half-precision weights as well it would be 18."""


BYTES_PER_PARAMETER = {Contents.MASTERS: 12, Contents.MIXED: 14, Contents.GRADIENTS: 16}
PER_NODE = "nodes"
PER_GPU = "gpus"


def megalite_bytes_per_parameter(optimizer: str) -> int:
    """Returns the bytes per parameter in checkpoints of `megalite train`: weights and moments in fp32."""
    return 4 * (1 + MOMENTS[optimizer])


@dataclass(frozen=True)
class Storage:
    """Writers of a checkpoint and their speed."""

    writers: int | str = PER_NODE  # a number of them, one per node, or one per GPU
    writer_bytes_per_s: float = 7e9  # the worked example's; about one NVMe drive
    storage_bytes_per_s: float | None = 100e9  # all writers together get no more; None: no limit
    background: bool = False
    copy_bytes_per_s: float = 10e9  # per GPU, to host memory: how long a background save blocks

    def writers_on(self, gpus: int, nodes: int) -> int:
        """Returns the number of writers, at most one per GPU: each writes what it holds."""
        if isinstance(self.writers, int):
            return min(self.writers, gpus)
        return nodes if self.writers == PER_NODE else gpus

    def bytes_per_s(self, gpus: int, nodes: int) -> float:
        """Bandwidth of all writers together."""
        together = self.writers_on(gpus, nodes) * self.writer_bytes_per_s
        return together if self.storage_bytes_per_s is None else min(together, self.storage_bytes_per_s)

    def save(self, checkpoint_bytes: float, gpus: int, nodes: int) -> Save:
        """Returns the times of a save with equal parts for all writers. In the background a copy to the host blocks,
        each GPU its own part, and the write begins after it."""
        write_s = checkpoint_bytes / self.bytes_per_s(gpus, nodes)
        if not self.background:
            return Save(write_s, write_s)
        copy_s = checkpoint_bytes / gpus / self.copy_bytes_per_s
        return Save(copy_s, copy_s + write_s)
