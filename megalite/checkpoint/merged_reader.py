"""Reads the weights of a checkpoint with its adapters merged into them.

Whoever needs a model and trains no adapters, such as generation, an export or another run's start, sees a checkpoint
without any: each target's weight is `W + alpha / rank * B A`, computed in fp32 for the block that is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import WEIGHT, Slices, adapter_of, printable
from megalite.checkpoint.reader import CheckpointReader
from megalite.parallel.adapters import FACTORS, is_factor


class MergedReader(CheckpointReader):
    """A complete checkpoint folder, as a model without adapters. Raises CheckpointError if it is not one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.adapter = adapter_of(self.manifest, folder)
        if self.adapter.name == "none" and any(map(is_factor, self.manifest.tensors)):
            raise CheckpointError(f"{folder}: holds adapters, of which its manifest says neither rank nor alpha")
        wanted = {factor for pair in self.factors.values() for factor in pair}
        if differing := sorted(wanted.symmetric_difference(filter(is_factor, self.manifest.tensors))):
            what = "lacks" if differing[0] in wanted else "holds, beside the adapters that its manifest describes,"
            raise CheckpointError(f"{folder}: {what} {printable(differing[0])}")

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of each weight, by canonical name, without the adapters'."""
        return {name: shape for name, shape in self.manifest.tensors.items() if not is_factor(name)}

    @property
    def has_adapters(self) -> bool:
        """True if the run that saved it trained adapters."""
        return self.adapter.name != "none"

    @cached_property
    def factors(self) -> Mapping[str, tuple[str, str]]:
        """The names of both factors of each weight that has an adapter, by its canonical name."""
        weights = tuple(f".{projection}.weight" for projection in self.adapter.projections)
        layers = [name.removesuffix(".weight") for name in self.shapes if name.endswith(weights)]
        a, b = FACTORS
        return {f"{layer}.weight": (f"{layer}.{a}", f"{layer}.{b}") for layer in layers}

    def fill(self, target: Tensor, name: str, source: Slices, kind: str = WEIGHT) -> None:
        """Reads a slice into a tensor of its shape, on any device; of a weight with its adapter's part."""
        if kind != WEIGHT or name not in self.factors:
            super().fill(target, name, source, kind)
            return
        rows, columns = source
        (a, b), rank = self.factors[name], slice(0, self.adapter.rank)
        block, down, up = (
            torch.empty(*(s.stop - s.start for s in part)) for part in (source, (rank, columns), (rows, rank))
        )
        super().fill(block, name, source)
        super().fill(down, a, (rank, columns))
        super().fill(up, b, (rows, rank))
        target.copy_(block.addmm_(up, down, alpha=self.adapter.alpha / self.adapter.rank))

    def view(self, name: str, source: Slices) -> Tensor | None:
        """Returns a slice of the weight `name` as a view of the mapped file; None if it is in none, as merged."""
        return None if name in self.factors else super().view(name, source)
