"""Inputs on which our decoder is compared with transformers' model.

In: a model's sizes and perhaps a tokenizer. Out: `Probe`s of given lengths: padded rows, packed documents, real text,
random tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_pipeline.tokenizers.reading import HubTokenizer
from launch.reference.models import Rows
from megalite.config import ModelConfig

PADDED_TOKENS = 64  # in the longest padded row: padding does not depend on length
MARGIN = 32  # tokens beyond a window or threshold
USUAL_TOKENS = 128  # without either
MOST_COMPARED = 256  # tokens of a row, evenly spaced: logits of all tokens of a long row would fill the memory


@dataclass(frozen=True)
class Probe:
    """Rows of tokens on which two models are compared."""

    name: str
    rows: Rows

    @property
    def columns(self) -> Tensor:
        """The compared tokens of a row `[K]`, the last one among them."""
        length = self.rows.tokens.shape[1]
        return torch.linspace(0, length - 1, min(length, MOST_COMPARED)).round().long().unique()


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
    shape, places = f"{len(lengths)} x {short}", torch.arange(short).expand(len(lengths), short)
    # padding after the text changes nothing before it, so our model needs no mask
    real = places < torch.tensor(lengths).unsqueeze(1)
    yield Probe(f"rows padded on the right ({shape})", Rows(drawn(len(lengths), short), real=real))
    first = short - torch.tensor(lengths).unsqueeze(1)
    real = places >= first
    positions = torch.where(real, places - first, places)  # to us padding before the text is another document
    yield Probe(f"rows padded on the left ({shape})", Rows(drawn(len(lengths), short), positions, real=real))
    if length >= 3:
        packed = (1, length // 3, length - 1 - length // 3)
        positions = torch.cat([torch.arange(count) for count in packed]).unsqueeze(0)
        yield Probe(f"packed documents ({' + '.join(map(str, packed))})", Rows(drawn(1, length), positions))
    if text is not None:
        yield Probe(f"real text (1 x {length})", Rows(text[:length].unsqueeze(0)))
    yield Probe(f"random tokens (2 x {length})", Rows(drawn(2, length)))


def real_text(tokenizer: HubTokenizer, length: int, vocab_size: int) -> Tensor | None:
    """Returns `length` tokens of a file of Python's standard library, repeated if it is too short; None if there are
    none or the model does not know them."""
    source = Path(argparse.__file__).read_text(encoding="utf-8")[: 8 * length + 1000]  # tokens are rarely longer
    ids = tokenizer.ids(source)
    if not ids or max(ids) >= vocab_size:
        return None
    return torch.tensor((ids * (length // len(ids) + 1))[:length])
