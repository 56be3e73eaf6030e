"""Generating tokens one after another with a serial model: what was computed for a token is kept, not computed again.

In: one prompt's token ids, and a model of one rank (all tensor-parallel ranks run this together). Out: new token ids,
equal on all of them. Text, files and ranks are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel
from megalite.parallel.loss import head_logits
from models.attention import Attention
from models.cache import KeyValueCache
from models.decoder import PositionEmbedding

Choose = Callable[[Tensor], int]


@torch.no_grad()
def generate(
    model: SerialModel, config: ModelConfig, tp: TensorParallel, prompt: Sequence[int], choose: Choose, most: int
) -> Iterator[int]:
    """At most `most` tokens that go on from `prompt`, each as soon as it is chosen; the caller may stop sooner.

    `choose` takes the logits `[vocab]` of the next token and returns its id. The first step reads the whole prompt,
    every other one a single token. With learned positions the model reads at most `max_position_embeddings` tokens;
    it never reads the last one that is generated.
    """
    device = next(model.parameters()).device
    tokens, read, changes_after = list(prompt), 0, _length_where_angles_change(config)
    with _remembering(model, capacity=len(prompt) + most - 1) as remember:
        for _ in range(most):
            if read <= changes_after < len(tokens):
                read = 0
            remember(read)
            hidden, head = model(torch.tensor([tokens[read:]], device=device))
            read = len(tokens)
            logits = head_logits(hidden[:, -1:], head, config.vocab_size, tp, config.final_logit_softcapping)
            tokens.append(choose(logits[0, 0]))
            yield tokens[-1]


def _length_where_angles_change(config: ModelConfig) -> int:
    """Sequences longer than this have other angles for all their tokens, so what was computed before is worthless;
    transformers' Phi-3 computes it again as well. -1: there is no such length."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return -1
    return scaling.original_max_position_embeddings or config.max_position_embeddings


@contextmanager
def _remembering(model: SerialModel, capacity: int) -> Iterator[Callable[[int], None]]:
    """While open, the layers remember the tokens that they read, at most `capacity`. Gives a function that makes them
    forget all but the first so many.

    That takes 2 x kv_heads/tp x head_dim numbers a layer and token, in layers with a sliding window too: what a window
    has left behind is masked and not freed, which keeps one simple cache for all layers.
    """
    weight = next(model.parameters())
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    positions = [module for module in model.modules() if isinstance(module, PositionEmbedding)]
    caches = [
        KeyValueCache(1, attention.local_kv_heads, capacity, attention.head_dim, weight.dtype, weight.device)
        for attention in attentions
    ]

    def remember(length: int) -> None:
        for cache in caches:
            cache.length = length
        for position in positions:
            position.offset = length

    for attention, cache in zip(attentions, caches, strict=True):
        attention.cache = cache
    try:
        yield remember
    finally:
        remember(0)
        for attention in attentions:
            attention.cache = None
