"""Observations of a solved problem: global arrays by quantity and name, independent of the layout.

In: blocks from all ranks. Out: `Observations`, and the arrays of which two ranks hold different copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Quantity(NamedTuple):
    """One kind of number, the training in which it was observed, and the step, where arrays of several are compared."""

    training: str
    kind: str
    step: int = 1

    def __str__(self) -> str:
        return f"{self.training} {self.kind}" + (f" in step {self.step}" if self.step > 1 else "")


Observations = dict[Quantity, dict[str, np.ndarray]]  # quantity -> name -> global array


FIRST_STEP = "step 1"
COPIES = "copies"  # names are sentences about copies that differ
TOKEN_LOSS = "token loss"
NEAR_CHOICES = "near choices"  # tokens that rounding might route to another expert
REDUCTION = "gradient reduction"  # largest error of a parameter's mean gradient, one entry per rank
SOURCE_LOSS = "source loss"  # mean over the tokens of one source of a mix
OF_REFERENCES = (TOKEN_LOSS, NEAR_CHOICES)  # observed only by references
BEFORE, AFTER = "before training", "after training"


def by_step(values: Sequence[float]) -> dict[str, np.ndarray]:
    """Names one number per training step."""
    return {f"step {step}": np.array([value]) for step, value in enumerate(values, start=1)}


def by_source(sums: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Names the mean loss of each source that has valid targets, by its place among the sorted names."""
    places = np.nonzero(counts)[0]
    return {f"source {place}": sums[place : place + 1] / counts[place] for place in places}


def around(before: float, after: float) -> dict[str, np.ndarray]:
    """Names one number before training and one after it."""
    return {BEFORE: np.array([before]), AFTER: np.array([after])}


@dataclass(frozen=True)
class ArrayBlock:
    """One rank's part of one global array."""

    quantity: Quantity
    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]
    value: np.ndarray


def whole(quantity: Quantity, values: Mapping[str, np.ndarray]) -> Iterator[ArrayBlock]:
    """Yields arrays that this rank holds completely."""
    for name, value in values.items():
        yield ArrayBlock(quantity, name, value.shape, tuple(slice(0, size) for size in value.shape), value)


def assemble(ranks: Sequence[Iterable[ArrayBlock]]) -> tuple[Observations, list[str]]:
    """Returns global arrays from all ranks' blocks, and a sentence for each array whose copies differ between ranks.

    Elements that no rank holds stay NaN, which equals nothing.
    """
    seen: Observations = {}
    first_writer: dict[tuple[Quantity, str], np.ndarray] = {}
    disagreements: dict[str, str] = {}
    for rank, blocks in enumerate(ranks):
        for block in blocks:
            arrays = seen.setdefault(block.quantity, {})
            if block.name not in arrays:
                arrays[block.name] = np.full(block.shape, np.nan, dtype=np.result_type(block.value, np.float32))
                first_writer[block.quantity, block.name] = np.full(block.shape, -1, dtype=np.int32)
            target = arrays[block.name][block.where]
            writers = first_writer[block.quantity, block.name][block.where]
            copies = writers >= 0
            differ = copies & ~np.isclose(target, block.value, rtol=0, atol=0, equal_nan=True)
            if differ.any():
                other = int(writers[differ].flat[0])
                size = np.abs(target[differ] - block.value[differ]).max()
                disagreements.setdefault(
                    f"{block.quantity} {block.name}",
                    f"{block.quantity} of {block.name} differs between ranks {other} and {rank} by {size:.1e}",
                )
            target[~copies] = block.value[~copies]
            writers[~copies] = rank
    return seen, list(disagreements.values())
