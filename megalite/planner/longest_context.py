"""The longest sequences that a model can be trained with on a cluster. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from megalite.config import Config, ConfigError
from megalite.config.auto import PIPELINE
from megalite.config.suggestions import OptionPath
from megalite.planner.hardware import Cluster
from megalite.planner.search import TENSOR, LayoutCandidate, search

LENGTH, BATCH = ("training", "sequence_length"), ("training", "global_batch_size")
POSITIONS = ("model", "max_position_embeddings")
LONGEST = 2**22  # tokens, up to which lengths are tried
PARTS = 8  # of the longest doubled length, in which the longest of all is found


@dataclass(frozen=True)
class ContextLength:
    """One length of sequences, with the layout to take for it; None where none fits."""

    length: int
    best: LayoutCandidate | None


def context_lengths(
    config: Config, cluster: Cluster, free: frozenset[OptionPath], report: Callable[[str], None] = lambda text: None
) -> list[ContextLength]:
    """Returns the config's own length, its doubles as far as they fit, and the longest between the last two.

    A step has no more tokens than the config's, so that longer sequences are fewer: a half, a quarter and so on, which
    as many replicas can share, and at last one, or one for each replica of a layout that is stated. Raises ConfigError
    for batches that come in stages.
    """
    if config.training.stages:
        raise ConfigError("--longest-context: training.stages states lengths of its own: leave it out")

    own, parallel = config.training.sequence_length, config.parallel
    parts = parallel.ranks_per_replica
    replicas = 1 if free & {TENSOR, PIPELINE} else max(1, cluster.accelerators // parts)

    def judged(length: int) -> ContextLength:
        report(f"judging sequences of {length:,} tokens")
        halvings = ((length - 1) // own).bit_length()
        batch = max(1, (config.training.global_batch_size >> halvings) // replicas) * replicas
        longer: dict[OptionPath, int] = {
            LENGTH: length,
            BATCH: batch,
            POSITIONS: max(length, config.model.max_position_embeddings),
        }
        with suppress(ConfigError):
            return ContextLength(length, search(config.with_resolved(longer), cluster, free=free).best)
        return ContextLength(length, None)

    found = [judged(own)]
    while found[-1].best is not None and 2 * found[-1].length <= LONGEST:
        found.append(judged(2 * found[-1].length))
    if found[-1].best is None and len(found) > 1:
        too_long = found.pop().length
        step = max(1, found[-1].length // PARTS)
        while found[-1].length + step < too_long:
            between = judged(found[-1].length + max(1, (too_long - found[-1].length) // step // 2) * step)
            if between.best is None:
                too_long = between.length
            else:
                found.append(between)
    return [one for one in found if one.best is not None]
