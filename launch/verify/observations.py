"""What a solved problem looks like: global arrays by quantity and name, whatever layout computed them.

In: blocks from all ranks. Out: `Observations`, and where two ranks hold different copies of the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Quantity(NamedTuple):
    """One kind of number and the training it was seen in."""

    training: str
    kind: str

    def __str__(self) -> str:
        return f"{self.training} {self.kind}"


Observations = dict[Quantity, dict[str, np.ndarray]]  # quantity -> name -> global array


FIRST_STEP = "step 1"
COPIES = "copies"  # a quantity by the sentences about copies that differ
TOKEN_LOSS = "token loss"
NEAR_CHOICES = "near choices"  # tokens that rounding might send to another expert
OF_REFERENCES = (TOKEN_LOSS, NEAR_CHOICES)  # what only they observe
BEFORE, AFTER = "before training", "after training"


def by_step(values: Sequence[float]) -> dict[str, np.ndarray]:
    """One number per training step, by name."""
    return {f"step {step}": np.array([value]) for step, value in enumerate(values, start=1)}


def around(before: float, after: float) -> dict[str, np.ndarray]:
    """One number before training and one after it, by name."""
    return {BEFORE: np.array([before]), AFTER: np.array([after])}


@dataclass(frozen=True)
class Block:
    """One rank's part of one global array."""

    quantity: Quantity
    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]
    value: np.ndarray


def whole(quantity: Quantity, values: Mapping[str, np.ndarray]) -> Iterator[Block]:
    """Arrays that this rank holds all of."""
    for name, value in values.items():
        yield Block(quantity, name, value.shape, tuple(slice(0, size) for size in value.shape), value)


SUMMED_ELSEWHERE = 1e-4  # of the largest entry


def _allowed(block: Block) -> float:
    """Stages sum the gradient of a tied weight in another order, so that it, its moments and its fp32 master weight may
    differ by rounding. What is computed with is equal to the bit, and each rank looks after that itself."""
    if block.quantity.kind in ("gradient", "exp_avg", "exp_avg_sq", "weight"):
        return SUMMED_ELSEWHERE * float(np.abs(block.value).max(initial=0.0))
    return 0.0


def assemble(ranks: Sequence[Iterable[Block]]) -> tuple[Observations, list[str]]:
    """Global arrays from all ranks' blocks, and a sentence for each array whose copies differ between ranks.

    Numbers that no rank holds stay NaN, which nothing equals.
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
            differ = copies & ~np.isclose(target, block.value, rtol=0, atol=_allowed(block), equal_nan=True)
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
