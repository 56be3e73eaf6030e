"""Generates tokens one after another with a serial model and a cache of keys and values.

In: one prompt's token ids, and the model of one rank (all tensor-parallel ranks run this together). Out: new token ids,
equal on all ranks. This module knows no text, files or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel
from megalite.parallel.loss import head_logits
from models.attention import Attention
from models.attention_kernels import WITHOUT_CUDNN
from models.decoder import PositionEmbedding
from models.key_value_cache import KeyValueCache


@dataclass(frozen=True)
class Sampling:
    """Options for choosing tokens, with the names, meaning and order of transformers'."""

    temperature: float = 0.0  # 0: always the most likely token
    top_k: int | None = None  # sample from this many most likely tokens, and those as likely as the last of them
    top_p: float = 1.0  # sample from the smallest set of most likely tokens with this total probability

    def probabilities(self, logits: Tensor) -> Tensor:
        """Converts logits `[..., vocab]` to probabilities of being sampled, fp32; temperature must not be 0."""
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            last = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < last, float("-inf"))
        if self.top_p < 1.0:  # Holtzman 2019
            ascending, order = scores.sort(descending=False)
            unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.top_p
            unlikely[..., -1:] = False  # the most likely token always stays
            scores = scores.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))
        return scores.softmax(dim=-1)

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Returns the next token for logits `[vocab]`; `generator` is on the CPU."""
        if self.temperature == 0:
            return int(logits.float().argmax())
        return int(torch.multinomial(self.probabilities(logits).cpu(), 1, generator=generator))


Choose = Callable[[Tensor], int]


@torch.no_grad()
def generate(
    model: SerialModel, config: ModelConfig, tp: TensorParallel, prompt: Sequence[int], choose: Choose, most: int
) -> Iterator[int]:
    """Yields at most `most` tokens that continue `prompt`, each as soon as it is chosen; the caller may stop earlier.

    `choose` takes the logits `[vocab]` of the next token and returns its id. The first step reads the whole prompt,
    every other one a single token. With learned positions the model reads at most `max_position_embeddings` tokens;
    it never reads the last generated one.
    """
    device = next(model.parameters()).device
    tokens, read, changes_after = list(prompt), 0, _length_where_angles_change(config)
    with _caching(model, capacity=len(prompt) + most - 1) as truncate:
        for _ in range(most):
            if read <= changes_after < len(tokens):
                read = 0
            truncate(read)
            with sdpa_kernel(WITHOUT_CUDNN):  # each token is one more key
                hidden, head = model(torch.tensor([tokens[read:]], device=device))
            read = len(tokens)
            logits = head_logits(hidden[:, -1:], head, config.vocab_size, tp, config.final_logit_softcapping)
            tokens.append(choose(logits[0, 0]))
            yield tokens[-1]


def _length_where_angles_change(config: ModelConfig) -> int:
    """Returns the length beyond which all tokens have other angles, so that the cache becomes invalid, or -1;
    transformers' Phi-3 recomputes it as well."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return -1
    return scaling.original_max_position_embeddings or config.max_position_embeddings


@contextmanager
def _caching(model: SerialModel, capacity: int) -> Iterator[Callable[[int], None]]:
    """Makes the layers cache the tokens that they read, at most `capacity`. Yields a function that truncates the caches
    to a number of tokens.

    A layer caches 2 x kv_heads/tp x head_dim elements per token, even with a sliding window: tokens outside of it are
    masked and not freed, which allows one simple cache for all layers.
    """
    weight = next(model.parameters())
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    positions = [module for module in model.modules() if isinstance(module, PositionEmbedding)]
    caches = [
        KeyValueCache(1, attention.local_kv_heads, capacity, attention.head_dim, weight.dtype, weight.device)
        for attention in attentions
    ]

    def truncate(length: int) -> None:
        for cache in caches:
            cache.length = length
        for position in positions:
            position.offset = length

    for attention, cache in zip(attentions, caches, strict=True):
        attention.cache = cache
    try:
        yield truncate
    finally:
        truncate(0)
        for attention in attentions:
            attention.cache = None
