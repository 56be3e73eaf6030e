"""What the two models are compared on: tokens, and how each of the models is told where documents begin.

In: a model's sizes and perhaps a tokenizer. Out: `Probe`s of given lengths: padded rows, packed documents, real text,
random tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig

PADDED_TOKENS = 64  # of the longest padded row: padding is not about length
MARGIN = 32  # tokens beyond a window or threshold
USUAL_TOKENS = 128  # where neither is there


@dataclass(frozen=True)
class Probe:
    """Some rows of tokens, and which of their logits are compared."""

    name: str
    tokens: Tensor  # [batch, seq]
    compared: Tensor  # bool [batch, seq]: the tokens that are no padding
    positions: Tensor | None = None  # [batch, seq], ours: where each document (padding before one, too) begins
    attention_mask: Tensor | None = None  # [batch, seq], theirs: 0 is padding
    position_ids: Tensor | None = None  # [batch, seq], theirs
    documents: tuple[int, ...] = ()  # lengths; theirs are run one by one

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


def wanted_length(model: ModelConfig) -> int:
    """Tokens of a row that shows all that the model does."""
    wanted = max(USUAL_TOKENS, needed_length(model) + MARGIN)
    return min(wanted, model.max_position_embeddings) if model.position_embedding == "learned" else wanted


def needed_length(model: ModelConfig) -> int:
    """Tokens beyond which a row sees the sliding window and what rotary scaling is about; 0 without either."""
    has_window = "sliding_attention" in model.layer_types
    return max((model.sliding_window or 0) if has_window else 0, scaling_threshold(model) or 0)


def scaling_threshold(model: ModelConfig) -> int | None:
    """Tokens from which on scaled rotary embedding differs from what it was first trained with."""
    if model.rope_scaling is None or model.position_embedding != "rope":
        return None
    return model.rope_scaling.original_max_position_embeddings or model.max_position_embeddings


def probes(model: ModelConfig, length: int, text: Tensor | None) -> Iterator[Probe]:
    """All comparisons with rows of at most `length` tokens, in the order in which they have to be run: transformers'
    dynamic rotary scaling remembers the longest sequence until it sees a short one.

    `text`: tokens of real text, at least `length`, if there is a tokenizer.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(batch: int, seq: int) -> Tensor:
        return torch.randint(model.vocab_size, (batch, seq), generator=generator)

    short = min(length, PADDED_TOKENS)
    threshold = scaling_threshold(model)
    if threshold is not None:  # the length of the longest row decides there for all rows of a batch
        short = min(short, threshold)
    lengths = sorted({short, (short + 1) // 2, 1}, reverse=True)
    yield _padded_right(drawn(len(lengths), short), lengths)
    yield _padded_left(drawn(len(lengths), short), lengths)
    if length >= 3:
        yield _packed(drawn(1, length))
    if text is not None:
        tokens = text[:length].unsqueeze(0)
        yield Probe(f"real text (1 x {length})", tokens, torch.ones_like(tokens, dtype=torch.bool))
    tokens = drawn(2, length)
    yield Probe(f"random tokens (2 x {length})", tokens, torch.ones_like(tokens, dtype=torch.bool))


def _padded_right(tokens: Tensor, lengths: list[int]) -> Probe:
    """Padding after the text changes nothing before it, so we need not be told of it."""
    real = torch.arange(tokens.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    return Probe(_padded_name("right", tokens), tokens, real, attention_mask=real.long())


def _padded_left(tokens: Tensor, lengths: list[int]) -> Probe:
    """Padding before the text is another document to us."""
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    first = tokens.shape[1] - torch.tensor(lengths).unsqueeze(1)
    real = places >= first
    return Probe(
        _padded_name("left", tokens),
        tokens,
        real,
        positions=torch.where(real, places - first, places),
        attention_mask=real.long(),
        position_ids=(places - first).clamp(min=0),
    )


def _padded_name(side: str, tokens: Tensor) -> str:
    return f"rows padded on the {side} ({tokens.shape[0]} x {tokens.shape[1]})"


def _packed(tokens: Tensor) -> Probe:
    """Three documents in a row: one of a single token, a short and a long one."""
    length = tokens.shape[1]
    lengths = (1, length // 3, length - 1 - length // 3)
    positions = torch.cat([torch.arange(count) for count in lengths])
    return Probe(
        f"packed documents ({' + '.join(map(str, lengths))})",
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        positions=positions.unsqueeze(0),
        documents=lengths,
    )


def real_text(tokenizer: Any, length: int, vocab_size: int) -> Tensor | None:
    """`length` tokens of a file of Python's standard library, again and again if need be; None where they are none, or
    none of the model's."""
    source = Path(argparse.__file__).read_text(encoding="utf-8")[: 8 * length + 1000]  # a token is seldom longer
    ids = list(tokenizer(source, verbose=False)["input_ids"])
    if not ids or max(ids) >= vocab_size:
        return None
    return torch.tensor((ids * (length // len(ids) + 1))[:length])
