"""Validates a conversion by comparing our logits with those of transformers, on the same tokens, in fp32.

Names and shapes can be right while the numbers are wrong, so only logits show that a model was converted correctly.
Compared are padded rows, packed documents (each alone in transformers), real text if there is a tokenizer, and random
tokens, on sequences longer than a sliding window or the threshold of rotary scaling, as far as a minute allows. A model
that does not fit into memory twice is compared by its first layers, at full width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from data_pipeline.tokenizers.reading import HubTokenizer
from launch.conversion.huggingface.folder_lookup import model_of
from launch.conversion.huggingface.progress import ReportProgress
from launch.conversion.huggingface.serial_model import Read, global_shapes, serial_model
from launch.errors import LaunchError
from launch.reference import LOGITS_TOLERANCE
from launch.reference.logits import ModelPair
from launch.reference.models import SerialReference, TransformersModel, load_transformers
from launch.reference.probes import PADDED_TOKENS, Probe, needed_length, probes, real_text, wanted_length
from megalite.checkpoint.huggingface.json_files import CONFIG, read_json
from megalite.checkpoint.huggingface.tokenizer_folder import tokenizer_files
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from models.families import family, model_config

ROUNDING_FACTOR = 3  # allowed multiple of the difference between two ways in which transformers computes the same
SECONDS = 60.0  # estimated time of all comparisons of one model
LEAST_LAYERS, LEAST_TOKENS = 2, 16
ROWS_OF_SCORES = 4  # fp32 matrices [seq, seq] at once with fused attention; without it there are two per head
PROBES = 5


@dataclass(frozen=True)
class Validation:
    """The comparisons made, and the largest difference over the logits' standard deviation; the default is none."""

    difference: float | None = None
    compared: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    seconds: float = 0.0


def validate_logits(model: ModelConfig, read: Read, hf_dir: Path, report: ReportProgress) -> Validation:
    """Compares the decoder of `model`, with the weights that `read` returns, to transformers' model in `hf_dir`.

    Raises LaunchError naming the first layer that differs.
    """
    started, first, wanted = time.monotonic(), layers_of_every_kind(model), wanted_length(model)
    text, notices = _real_text(hf_dir, model, wanted)
    length, needed_tokens, needed, free = 0, needed_length(model), _memory(model), _free_memory()
    differences: list[float] = []
    compared: list[str] = []

    def compare(where: str, model: ModelConfig, config: dict[str, Any] | None = None) -> int:
        report(f"comparing logits{where} with transformers", 0, PROBES)  # which is loaded first, for seconds
        pair = model_pair(model, read, hf_dir, config)
        length = _affordable(pair, wanted)
        for number, probe in enumerate(probes(pair.ours.model, length, text)):
            report(f"comparing logits{where} with transformers", number, PROBES)
            difference, rounding = _difference(pair, probe)
            if rounding is not None:
                notices.append(
                    f"on {probe.name}{where} logits are {difference:.1e} of their spread apart: rounding, by which "
                    f"transformers differs from itself ({rounding:.1e})"
                )
            differences.append(difference)
            compared.append(f"{probe.name}{where}")
        return length

    if needed <= free / 2:
        length = compare("", model)
    else:
        notices.append(
            f"of {model.num_hidden_layers} layers only the first {first} were compared: both models take "
            f"{needed / 1e9:,.1f} GB in fp32, and {free / 1e9:,.1f} GB are free"
        )
    if not compared or (length <= needed_tokens and first < model.num_hidden_layers):
        config = _shortened_config(hf_dir, first)
        smaller = model_of(model_config(config), str(hf_dir / CONFIG))
        # transformers reads each pickle whole
        whole_file = max((path.stat().st_size for path in hf_dir.glob("pytorch_model*.bin")), default=0)
        if _memory(smaller) + whole_file > free / 2:
            raise LaunchError(
                f"{hf_dir}: {free / 1e9:,.1f} GB of memory are free, too few to compare even {first} layers "
                "with transformers, so nothing was written: free some memory, or convert with --no-validate"
            )
        length = max(length, compare(f" in the first {first} layers", smaller, config))
    if length <= needed_tokens:
        notices.append(
            f"compared were at most {length} tokens in a row: more than {needed_tokens}, where its sliding window or "
            "rotary scaling shows, take too long or too much memory here"
        )
    return Validation(max(differences), tuple(compared), tuple(notices), time.monotonic() - started)


def model_pair(model: ModelConfig, read: Read, hf_dir: Path, config: dict[str, Any] | None = None) -> ModelPair:
    """Builds our decoder and transformers' from a folder, with other options than its own if there is a `config`."""
    from transformers import AutoModelForCausalLM

    theirs = load_transformers(AutoModelForCausalLM, hf_dir, config)
    return ModelPair(
        SerialReference(model, serial_model(model, TensorParallel(), read)),
        TransformersModel(model, theirs, runs_documents_alone=True),
    )


def layers_of_every_kind(model: ModelConfig) -> int:
    """Returns the smallest number of first layers that contains every kind of layer of `model`, at least two."""
    layers = range(model.num_hidden_layers)
    kinds = [(model.has_window(layer), model.has_experts(layer), model.rotary_dim(layer)) for layer in layers]
    last_new = max(kinds.index(kind) for kind in set(kinds))
    return min(model.num_hidden_layers, max(LEAST_LAYERS, last_new + 1))


def _shortened_config(hf_dir: Path, layers: int) -> dict[str, Any]:
    """Returns config.json with fewer layers; lists with one entry per layer are shortened too."""
    config = read_json(hf_dir / CONFIG)
    key = family(config.get("model_type")).all_keys["num_hidden_layers"]
    return {
        name: value[:layers] if isinstance(value, list) and len(value) == config[key] else value
        for name, value in config.items()
    } | {key: layers}


def _memory(model: ModelConfig) -> int:
    """Returns the bytes of both models in fp32."""
    return 2 * 4 * sum(map(prod, global_shapes(model).values()))


def _free_memory() -> int:
    return int(psutil.virtual_memory().available)


def _real_text(hf_dir: Path, model: ModelConfig, length: int) -> tuple[Tensor | None, list[str]]:
    """Returns tokens of real text, and a notice if there are none although there is a tokenizer."""
    if not tokenizer_files(hf_dir):
        return None, []
    try:
        tokens = real_text(HubTokenizer(hf_dir), length, model.vocab_size)
    except Exception as error:  # of a kind that is not installed, or broken, which says nothing about the weights
        return None, [f"no real text was compared: {' '.join(str(error).split())}"]
    if tokens is None:
        return None, ["no real text was compared: the tokenizer makes tokens the model does not know"]
    return tokens, []


def _difference(pair: ModelPair, probe: Probe) -> tuple[float, float | None]:
    """Returns the difference of logits, and that by which transformers differs from itself if ours is larger than
    `LOGITS_TOLERANCE`. Raises LaunchError if rounding does not explain it."""
    difference = pair.difference(probe)
    if difference <= LOGITS_TOLERANCE:  # NaN is not
        return difference, None
    rounding = pair.rounding(probe)
    allowed = max(LOGITS_TOLERANCE, ROUNDING_FACTOR * rounding)
    if not difference <= allowed:
        layer = pair.first_different_layer(probe, allowed)
        raise LaunchError(
            f"{pair.ours.model.model_type}: our decoder's logits and transformers' are {difference:.1e} of their "
            f"spread apart on {probe.name}, more than {allowed:.1e}, and {layer} is the first layer that "
            "differs: the conversion would change the model, so nothing was written"
        )
    return difference, allowed / ROUNDING_FACTOR


def _affordable(pair: ModelPair, wanted: int) -> int:
    """Returns the largest length of rows, at most `wanted`, that takes `SECONDS` and a quarter of the free memory."""
    model, seconds = pair.ours.model, pair.seconds_per_token()
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
