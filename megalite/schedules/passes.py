"""The passes of micro-batches through the chunks of a pipeline stage. No torch."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class PassKind(enum.StrEnum):
    """Kind of pass of a micro-batch through a chunk."""

    FORWARD = "forward"
    BACKWARD = "backward"  # both gradients at once
    INPUT_GRADIENT = "input gradient"  # the part that the stage before waits for
    WEIGHT_GRADIENT = "weight gradient"  # the part that nobody waits for before the optimizer step


class Task(NamedTuple):
    """One pass in the order of its stage."""

    kind: PassKind
    micro_batch: int
    chunk: int = 0


def number_passes(order: Iterable[tuple[PassKind, int]]) -> list[Task]:
    """Numbers passes that are given as (kind, chunk): the n-th of a kind through a chunk is that of micro-batch n.

    A whole backward counts as an input gradient and a weight gradient.
    """
    done: Counter[tuple[PassKind, int]] = Counter()
    tasks = []
    for kind, chunk in order:
        first = PassKind.INPUT_GRADIENT if kind is PassKind.BACKWARD else kind
        tasks.append(Task(kind, done[first, chunk], chunk))
        done[first, chunk] += 1
        done[PassKind.WEIGHT_GRADIENT, chunk] += kind is PassKind.BACKWARD
    return tasks
