"""Whether a conversion is right: our logits and transformers', on the same tokens, in fp32.

Names and shapes can all be right and the numbers wrong, so logits are what says that a model was converted. Compared
are padded rows, packed documents (each alone on transformers' side), real text where there is a tokenizer, and random
tokens, on sequences longer than a sliding window or the length that rotary scaling is about, as far as a minute takes
them. A model that memory does not hold twice is compared by its first layers, at full width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
from torch import Tensor

from launch.convert.first_layers import FirstLayers
from launch.convert.pair import Pair
from launch.convert.probes import PADDED_TOKENS, Probe, needed_length, probes, real_text, wanted_length
from launch.convert.progress import Stopwatch, Tell
from launch.convert.serial import Read, global_shapes
from launch.errors import LaunchError
from launch.transformers_model import load_tokenizer
from megalite.checkpoint.hugging_face import tokenizer_files
from megalite.config import ModelConfig

TOLERANCE = 1e-5  # of the logits' standard deviation, in fp32; both models run the same operations
ROUNDING_FACTOR = 3  # times what transformers differs from itself
SECONDS = 60.0  # for all comparisons of one model, as estimated before them
LEAST_TOKENS = 16
ROWS_OF_SCORES = 4  # fp32 matrices [seq, seq] at once beside fused attention; without it one for each head
PROBES = 5

Text = Callable[[int], Tensor | None]
"""At least so many tokens of real text; None where there is no tokenizer for it."""


@dataclass(frozen=True)
class Validation:
    """What was compared, and the largest difference over the logits' standard deviation; None: nothing was."""

    difference: float | None
    compared: tuple[str, ...]
    notices: tuple[str, ...]
    seconds: float

    @classmethod
    def of_nothing(cls) -> Validation:
        """For --no-validate."""
        return cls(None, (), (), 0.0)


@dataclass(frozen=True)
class _Outcome:
    """Of one pair of models."""

    difference: float
    length: int  # tokens of the longest rows
    compared: tuple[str, ...]
    notices: tuple[str, ...]


def validate_logits(model: ModelConfig, read: Read, hf_dir: Path, scratch: Path, tell: Tell) -> Validation:
    """Compares the decoder of `model`, with the weights that `read` gives, to transformers' model in `hf_dir`.

    `scratch`: a folder for a smaller copy where one is needed. Raises LaunchError naming the first layer that differs.
    """
    watch, first, wanted = Stopwatch(), FirstLayers.of(model), wanted_length(model)
    text, notices = _text_of(hf_dir, model)
    outcomes: list[_Outcome] = []
    needed, free = _memory(model), _free_memory()
    if needed <= free / 2:
        outcomes.append(_compare(Pair(model, read, hf_dir), wanted, text, tell, ""))
    else:
        notices += (
            f"of {model.num_hidden_layers} layers only the first {first.count} were compared: both models take "
            f"{needed / 1e9:,.1f} GB in fp32, and {free / 1e9:,.1f} GB are free",
        )
    needed_tokens = needed_length(model)
    if not outcomes or (outcomes[0].length <= needed_tokens and first.count < model.num_hidden_layers):
        with first.copied(hf_dir, scratch) as (smaller, folder):
            if _memory(smaller) > free / 2:
                raise LaunchError(
                    f"{hf_dir}: {free / 1e9:,.1f} GB of memory are free, too few to compare even {first.count} layers "
                    "with transformers, so nothing was written: free some memory, or convert with --no-validate"
                )
            what = f" in the first {first.count} layers"
            outcomes.append(_compare(Pair(smaller, read, folder), wanted, text, tell, what))
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
        watch.seconds,
    )


def _memory(model: ModelConfig) -> int:
    """Bytes of both models in fp32."""
    return 2 * 4 * sum(map(prod, global_shapes(model).values()))


def _free_memory() -> int:
    return int(psutil.virtual_memory().available)


def _text_of(hf_dir: Path, model: ModelConfig) -> tuple[Text, tuple[str, ...]]:
    """Where real text comes from, and what to say where there is none though there is a tokenizer."""
    if not tokenizer_files(hf_dir):
        return lambda length: None, ()
    try:
        tokenizer = load_tokenizer(hf_dir)
        tokens = real_text(tokenizer, 1, model.vocab_size)
    except Exception as error:  # a tokenizer of a kind that is not installed, or a broken one: weights are no worse
        return lambda length: None, (f"no real text was compared: {' '.join(str(error).split())}",)
    if tokens is None:
        return lambda length: None, ("no real text was compared: the tokenizer makes tokens the model does not know",)
    return lambda length: real_text(tokenizer, length, model.vocab_size), ()


def _compare(pair: Pair, wanted: int, text: Text, tell: Tell, what: str) -> _Outcome:
    """Raises LaunchError where logits differ by more than rounding."""
    length = _affordable(pair, wanted)
    worst, compared, notices = 0.0, [], []
    for number, probe in enumerate(probes(pair.model, length, text(length))):
        tell("comparing logits", number, PROBES)
        difference, allowed = pair.difference(probe), TOLERANCE
        if not difference <= TOLERANCE:  # NaN is not
            allowed = max(TOLERANCE, ROUNDING_FACTOR * pair.rounding(probe))
            if not difference <= allowed:
                raise _they_differ(pair, probe, difference, allowed)
            notices.append(
                f"on {probe.name}{what} logits are {difference:.1e} of their spread apart: rounding, by which "
                f"transformers differs from itself ({allowed / ROUNDING_FACTOR:.1e})"
            )
        worst = max(worst, difference)
        compared.append(f"{probe.name}{what}")
    return _Outcome(worst, length, tuple(compared), tuple(notices))


def _they_differ(pair: Pair, probe: Probe, difference: float, allowed: float) -> LaunchError:
    layer = pair.first_different_layer(probe, allowed)
    return LaunchError(
        f"{pair.model.model_type}: our decoder's logits and transformers' are {difference:.1e} of their spread apart "
        f"on {probe.name}, more than {allowed:.1e}, and {layer} is the first layer that differs: the conversion would "
        "change the model, so nothing was written"
    )


def _affordable(pair: Pair, wanted: int) -> int:
    """Tokens of a row, at most `wanted`, that are compared within `SECONDS` and a part of the memory."""
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
