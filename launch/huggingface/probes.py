"""Inputs on which two models are compared: tokens, and where documents begin in the form that each model expects.

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

PADDED_TOKENS = 64  # in the longest padded row: padding does not depend on length
MARGIN = 32  # tokens beyond a window or threshold
USUAL_TOKENS = 128  # without either


@dataclass(frozen=True)
class Probe:
    """Rows of tokens, and the selection of their logits to compare."""

    name: str
    tokens: Tensor  # [batch, seq]
    compared: Tensor  # bool [batch, seq]: tokens that are not padding
    positions: Tensor | None = None  # [batch, seq], for us: 0 where a document, or padding before one, begins
    attention_mask: Tensor | None = None  # [batch, seq], for transformers: 0 is padding
    position_ids: Tensor | None = None  # [batch, seq], for transformers
    documents: tuple[int, ...] = ()  # lengths of packed documents; transformers runs them one by one

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


def wanted_length(model: ModelConfig) -> int:
    """Returns the length of a row that exercises every option of the model."""
    wanted = max(USUAL_TOKENS, needed_length(model) + MARGIN)
    return min(wanted, model.max_position_embeddings) if model.position_embedding == "learned" else wanted


def needed_length(model: ModelConfig) -> int:
    """Returns the length beyond which a sliding window and rotary scaling take effect; 0 without either."""
    has_window = "sliding_attention" in model.layer_types
    return max((model.sliding_window or 0) if has_window else 0, scaling_threshold(model) or 0)


def scaling_threshold(model: ModelConfig) -> int | None:
    """Returns the length beyond which scaled rotary embedding differs from the original; None without scaling."""
    if model.rope_scaling is None or model.position_embedding != "rope":
        return None
    return model.rope_scaling.original_max_position_embeddings or model.max_position_embeddings


def probes(model: ModelConfig, length: int, text: Tensor | None) -> Iterator[Probe]:
    """Yields probes with rows of at most `length` tokens. Their order matters: transformers' dynamic rotary scaling
    remembers the longest sequence until it sees a short one.

    `text`: at least `length` tokens of real text, if there is a tokenizer.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(batch: int, seq: int) -> Tensor:
        return torch.randint(model.vocab_size, (batch, seq), generator=generator)

    short = min(length, PADDED_TOKENS)
    threshold = scaling_threshold(model)
    if threshold is not None:  # the longest row of a batch decides about the scaling of all its rows
        short = min(short, threshold)
    lengths = sorted({short, (short + 1) // 2, 1}, reverse=True)
    shape = f"{len(lengths)} x {short}"
    tokens, places = drawn(len(lengths), short), torch.arange(short).expand(len(lengths), short)
    real = places < torch.tensor(lengths).unsqueeze(1)
    # padding after the text changes nothing before it, so our model needs no mask
    yield Probe(f"rows padded on the right ({shape})", tokens, real, attention_mask=real.long())
    first = short - torch.tensor(lengths).unsqueeze(1)
    real = places >= first
    yield Probe(
        f"rows padded on the left ({shape})",
        drawn(len(lengths), short),
        real,
        positions=torch.where(real, places - first, places),  # to us padding before the text is another document
        attention_mask=real.long(),
        position_ids=(places - first).clamp(min=0),
    )
    if length >= 3:
        yield _packed(drawn(1, length))
    if text is not None:
        tokens = text[:length].unsqueeze(0)
        yield Probe(f"real text (1 x {length})", tokens, torch.ones_like(tokens, dtype=torch.bool))
    tokens = drawn(2, length)
    yield Probe(f"random tokens (2 x {length})", tokens, torch.ones_like(tokens, dtype=torch.bool))


def _packed(tokens: Tensor) -> Probe:
    """Packs three documents into a row: one of a single token, a short and a long one."""
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
    """Returns `length` tokens of a file of Python's standard library, repeated if it is too short; None if there are
    none or the model does not know them."""
    source = Path(argparse.__file__).read_text(encoding="utf-8")[: 8 * length + 1000]  # tokens are rarely longer
    ids = list(tokenizer(source, verbose=False)["input_ids"])
    if not ids or max(ids) >= vocab_size:
        return None
    return torch.tensor((ids * (length // len(ids) + 1))[:length])
