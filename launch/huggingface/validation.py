"""Validates a conversion by comparing our logits with those of transformers, on the same tokens, in fp32.

Names and shapes can be right while the numbers are wrong, so only logits show that a model was converted correctly.
Compared are padded rows, packed documents (each alone in transformers), real text if there is a tokenizer, and random
tokens, on sequences longer than a sliding window or the threshold of rotary scaling, as far as a minute allows. A model
that does not fit into memory twice is compared by its first layers, at full width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
from torch import Tensor

from launch.errors import LaunchError
from launch.huggingface.logit_comparison import ModelPair
from launch.huggingface.probes import PADDED_TOKENS, needed_length, probes, real_text, wanted_length
from launch.huggingface.progress import ReportProgress
from launch.huggingface.serial_model import Read, global_shapes
from launch.huggingface.transformers_model import load_tokenizer
from launch.huggingface.truncated_copy import layers_of_every_kind, truncated_copy
from megalite.checkpoint.huggingface.folder import tokenizer_files
from megalite.config import ModelConfig

TOLERANCE = 1e-5  # relative to the logits' standard deviation, in fp32; both models run the same operations
ROUNDING_FACTOR = 3  # allowed multiple of the difference between two ways in which transformers computes the same
SECONDS = 60.0  # estimated time of all comparisons of one model
LEAST_TOKENS = 16
ROWS_OF_SCORES = 4  # fp32 matrices [seq, seq] at once with fused attention; without it there are two per head
PROBES = 5

Text = Callable[[int], Tensor | None]
"""Returns at least this many tokens of real text; None without a tokenizer."""


@dataclass(frozen=True)
class Validation:
    """The comparisons made, and the largest difference over the logits' standard deviation; the default is none."""

    difference: float | None = None
    compared: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class _Outcome:
    """The result of comparing one pair of models."""

    difference: float
    length: int  # tokens of the longest rows
    compared: tuple[str, ...]
    notices: tuple[str, ...]


def validate_logits(model: ModelConfig, read: Read, hf_dir: Path, scratch: Path, report: ReportProgress) -> Validation:
    """Compares the decoder of `model`, with the weights that `read` returns, to transformers' model in `hf_dir`.

    `scratch`: a folder for a smaller copy if one is needed. Raises LaunchError naming the first layer that differs.
    """
    started, first, wanted = time.monotonic(), layers_of_every_kind(model), wanted_length(model)
    text, notices = _text_of(hf_dir, model)
    outcomes: list[_Outcome] = []
    needed, free = _memory(model), _free_memory()
    if needed <= free / 2:
        outcomes.append(_compare(ModelPair(model, read, hf_dir), wanted, text, report, ""))
    else:
        notices += (
            f"of {model.num_hidden_layers} layers only the first {first} were compared: both models take "
            f"{needed / 1e9:,.1f} GB in fp32, and {free / 1e9:,.1f} GB are free",
        )
    needed_tokens = needed_length(model)
    if not outcomes or (outcomes[0].length <= needed_tokens and first < model.num_hidden_layers):
        with truncated_copy(hf_dir, first, scratch) as (smaller, folder):
            if _memory(smaller) > free / 2:
                raise LaunchError(
                    f"{hf_dir}: {free / 1e9:,.1f} GB of memory are free, too few to compare even {first} layers "
                    "with transformers, so nothing was written: free some memory, or convert with --no-validate"
                )
            where = f" in the first {first} layers"
            outcomes.append(_compare(ModelPair(smaller, read, folder), wanted, text, report, where))
    length = max(outcome.length for outcome in outcomes)
    if length <= needed_tokens:
        notices += (
            f"compared were at most {length} tokens in a row: more than {needed_tokens}, where its sliding window or "
            "rotary scaling shows, take too long or too much memory here",
        )
    return Validation(
        max(outcome.difference for outcome in outcomes),
        tuple(sentence for outcome in outcomes for sentence in outcome.compared),
        notices + tuple(notice for outcome in outcomes for notice in outcome.notices),
        time.monotonic() - started,
    )


def _memory(model: ModelConfig) -> int:
    """Returns the bytes of both models in fp32."""
    return 2 * 4 * sum(map(prod, global_shapes(model).values()))


def _free_memory() -> int:
    return int(psutil.virtual_memory().available)


def _text_of(hf_dir: Path, model: ModelConfig) -> tuple[Text, tuple[str, ...]]:
    """Returns the source of real text, and a notice if there is none although there is a tokenizer."""
    if not tokenizer_files(hf_dir):
        return lambda length: None, ()
    try:
        tokenizer = load_tokenizer(hf_dir)
        tokens = real_text(tokenizer, 1, model.vocab_size)
    except Exception as error:  # of a kind that is not installed, or broken, which says nothing about the weights
        return lambda length: None, (f"no real text was compared: {' '.join(str(error).split())}",)
    if tokens is None:
        return lambda length: None, ("no real text was compared: the tokenizer makes tokens the model does not know",)
    return lambda length: real_text(tokenizer, length, model.vocab_size), ()


def _compare(pair: ModelPair, wanted: int, text: Text, report: ReportProgress, where: str) -> _Outcome:
    """Compares logits on all probes. Raises LaunchError if they differ by more than rounding."""
    length = _affordable(pair, wanted)
    worst, compared, notices = 0.0, [], []
    for number, probe in enumerate(probes(pair.model, length, text(length))):
        report("comparing logits", number, PROBES)
        difference, allowed = pair.difference(probe), TOLERANCE
        if not difference <= TOLERANCE:  # NaN is not
            allowed = max(TOLERANCE, ROUNDING_FACTOR * pair.rounding(probe))
            if not difference <= allowed:
                layer = pair.first_different_layer(probe, allowed)
                raise LaunchError(
                    f"{pair.model.model_type}: our decoder's logits and transformers' are {difference:.1e} of their "
                    f"spread apart on {probe.name}, more than {allowed:.1e}, and {layer} is the first layer that "
                    "differs: the conversion would change the model, so nothing was written"
                )
            notices.append(
                f"on {probe.name}{where} logits are {difference:.1e} of their spread apart: rounding, by which "
                f"transformers differs from itself ({allowed / ROUNDING_FACTOR:.1e})"
            )
        worst = max(worst, difference)
        compared.append(f"{probe.name}{where}")
    return _Outcome(worst, length, tuple(compared), tuple(notices))


def _affordable(pair: ModelPair, wanted: int) -> int:
    """Returns the largest length of rows, at most `wanted`, that takes `SECONDS` and a quarter of the free memory."""
    model, seconds = pair.model, pair.seconds_per_token()
    weights = sum(map(prod, global_shapes(model).values()))
    scores_share = 2 * model.num_hidden_layers * model.num_attention_heads * model.head_dim / weights  # per token
    matrices = ROWS_OF_SCORES if model.attn_logit_softcapping is None else 2 * model.num_attention_heads
    room, length = _free_memory() / 4, wanted

    def is_too_much(length: int) -> bool:
        tokens = 4 * length + 6 * PADDED_TOKENS
        return tokens * seconds * (1 + scores_share * length) > SECONDS or 4 * matrices * length**2 > room

    while length > LEAST_TOKENS and is_too_much(length):
        length = max(LEAST_TOKENS, length * 4 // 5)
    return length
