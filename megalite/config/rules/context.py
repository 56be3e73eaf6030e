"""Rules of context parallelism: how sequences and heads are cut over the ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.config.batch_stages import shapes_of
from megalite.config.config import Config
from megalite.config.sections import ContextParallelKind
from megalite.config.suggestions import multiples_near


def context_parallel_kind(config: Config) -> ContextParallelKind:
    """Returns how ranks that share sequences attend: where `auto` leaves it open, so that a layer moves fewer bytes.

    A rank of cp receives the keys and values of (cp - 1) / cp of the tokens, or in their place 1 / cp of its own
    queries, keys, values and contexts: twice the query heads, and twice those of keys, of which each rank needs one.
    """
    parallel, model = config.parallel, config.model
    if parallel.context_parallel_kind != "auto":
        return parallel.context_parallel_kind
    cp, tp = parallel.context_parallel_size, parallel.tensor_parallel_size
    heads, kv = model.num_attention_heads // tp, max(1, model.num_key_value_heads // tp)
    if cp == 1 or not _can_exchange(heads, kv, cp):
        return "all_gather"
    is_uneven = any(shape.sequence_length % (2 * cp) for shape in shapes_of(config.training))
    exchanged = (2 * heads + 2 * max(kv, cp)) / cp
    return "ulysses" if is_uneven or exchanged < 2 * kv else "all_gather"


def _can_exchange(heads: int, kv: int, cp: int) -> bool:
    return heads % cp == 0 and (kv % cp == 0 or cp % kv == 0)


def problems_with_context(config: Config) -> Iterator[str]:
    """Yields a sentence for each broken rule."""
    parallel, model = config.parallel, config.model
    cp, tp = parallel.context_parallel_size, parallel.tensor_parallel_size
    if cp == 1:
        return
    kind = context_parallel_kind(config)
    heads, kv = model.num_attention_heads // tp, max(1, model.num_key_value_heads // tp)
    if kind == "ulysses" and not _can_exchange(heads, kv, cp):
        yield (
            f"parallel.context_parallel_kind ulysses cannot deal {heads} heads and {kv} key/value heads of a "
            f"tensor-parallel rank to parallel.context_parallel_size {cp}: use a size that divides them, or all_gather"
        )
    is_cut = parallel.sequence_parallel and tp > 1
    parts = math.lcm(2 * cp if kind == "all_gather" else cp, cp * tp if is_cut else 1)
    beside = f", parallel.tensor_parallel_size {tp} and parallel.sequence_parallel" if is_cut else ""
    for length in dict.fromkeys(shape.sequence_length for shape in shapes_of(config.training)):
        if length % parts:
            yield (
                f"training.sequence_length {length} cannot be cut by parallel.context_parallel_size {cp}{beside} "
                f"({kind}): use a sequence_length of {multiples_near(length, parts)}"
            )
