"""What every layout and the reference are asked to compute: a small model, fresh random batches, two short trainings.

In: the user's config and the layouts. Out: a `Problem`, pure data that travels to ranks. No torch.

The two trainings catch different bugs. The config's own optimizer (AdamW) divides each gradient by its own size and so
hides one that was reduced twice or not at all, but shows moments, bias correction and decay groups. Plain SGD shows the
gradient's scale in every weight, and the global norm, because its clip bites at some steps and not at others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from launch.verify.layout import Layout
from megalite.config import Config, ModelConfig

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
MOST_HEADS, MOST_HEAD_DIM, MOST_LAYERS, MOST_VOCABULARY, MOST_SEQUENCE = 8, 32, 5, 2048, 64
MOST_HIDDEN = 256
PRIME_VOCABULARY = 2039  # a vocabulary that is cut down is no multiple of anything, so every rank pads
ROWS = 12  # sequences in a global batch, about
DENSE, SPARSE = 0.75, 0.05  # fraction of tokens with a loss; fewer mean a noisier gradient, and so a larger norm
SMALLEST_EPSILON = 1e-6


@dataclass(frozen=True)
class Batch:
    """A global batch, or the rows of it that one micro-batch holds."""

    tokens: np.ndarray  # [rows, seq] int64
    targets: np.ndarray  # [rows, seq] int64, -100: no loss
    positions: np.ndarray | None  # [rows, seq] int64, 0 at the start of each packed document
    samples: np.ndarray  # [rows] int64, their numbers in the order of the data

    def rows(self, which: slice) -> Batch:
        positions = None if self.positions is None else self.positions[which]
        return Batch(self.tokens[which], self.targets[which], positions, self.samples[which])


@dataclass(frozen=True)
class Training:
    """One short training from the initial weights."""

    name: str
    config: Config
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class Problem:
    """The config made small, and what is drawn for it from `seed`."""

    config: Config
    seed: int
    steps: int
    changes: tuple[str, ...] = ()  # how it differs from the user's config, a phrase each
    scales: Mapping[str, float] = field(default_factory=dict)  # end of a weight's name -> factor on its initial value

    def training(self) -> Training:
        """By the config's optimizer and clip, on packed documents."""
        return Training(self.config.optimizer.name, self.config, self._batches("packed"))

    def sgd(self, learning_rate: float, clip: float) -> Training:
        """By plain SGD, on sequences of one document; every second batch has few tokens with a loss."""
        optimizer = {"name": "sgd", "learning_rate": learning_rate, "weight_decay": 0.0}
        values = self.config.model_dump(mode="json") | {"optimizer": optimizer}
        values["training"] |= {"gradient_clipping": clip}
        return Training("sgd-under-clip", Config.model_validate(values), self._batches("whole"))

    def _batches(self, kind: str) -> tuple[Batch, ...]:
        draw = np.random.default_rng([self.seed, *kind.encode()])
        return tuple(self._batch(draw, kind, step) for step in range(self.steps))

    def _batch(self, draw: np.random.Generator, kind: str, step: int) -> Batch:
        training, vocabulary = self.config.training, self.config.model.vocab_size
        shape = training.global_batch_size, training.sequence_length
        tokens, targets = draw.integers(0, vocabulary, shape), draw.integers(0, vocabulary, shape)
        # unequal numbers of valid tokens in each row: a mean of means is then wrong
        kept = (SPARSE if kind == "whole" and step % 2 else DENSE) * draw.random((shape[0], 1)) * 2
        if step == self.steps - 1:
            kept[: shape[0] // 2] = 0  # whole micro-batches and replicas without a loss
        targets[draw.random(shape) >= kept] = -100
        targets[-1, 0] = tokens[-1, 0]  # at least one
        positions = None
        if kind == "packed":
            starts = draw.random(shape) < 3 / shape[1]
            starts[:, 0] = True
            index = np.arange(shape[1])
            positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        return Batch(tokens, targets, positions, step * shape[0] + np.arange(shape[0]))

    def initial_value(self, name: str, value: np.ndarray, where: tuple[slice, ...], shape: tuple[int, ...]) -> Any:
        """What a block of the weight `name` starts from, `value` being what a run would start from.

        Norms and biases start away from ones and zeros, which would hide a decay or a scale.
        """
        for end, factor in self.scales.items():
            value = value * np.float32(factor) if name.endswith(end) else value
        if len(shape) > 1:
            return value
        key = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=16).digest()
        drawn = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).standard_normal(shape[0])
        size = np.float32(0.1) * max(1e-3, float(np.abs(value).max(initial=0.0)) or 1.0)
        return value + size * drawn[where[0]].astype(np.float32)


def make_problem(
    config: Config, layouts: Sequence[Layout], *, seed: int, steps: int, full: bool, keep_dropout: bool = False
) -> Problem:
    """The problem that all `layouts` are asked to solve: one model, one global batch."""
    changes: list[str] = []
    model = config.model if full else _small_model(config.model, changes)
    if not keep_dropout:
        model = _without_dropout(model, changes)
    # at 0.02 a narrow model's attention is uniform, and a wrong rotation or mask shows in nothing
    spread = max(model.initializer_range, 1 / math.sqrt(model.hidden_size))
    model = model.model_copy(update={"initializer_range": spread})
    values = config.model_dump(mode="json")
    values["model"] = model.model_dump(mode="json")
    # `auto` and held-out documents belong to a run, not to this
    values["parallel"] = {}
    values["recompute"] = {}
    rows = math.lcm(*(layout.dp * layout.accumulation for layout in layouts))
    rows *= -(-ROWS // rows)
    sequence = _sequence_length(config, layouts, changes, full)
    values["training"] |= {
        "global_batch_size": rows,
        "micro_batch_size": rows,
        "sequence_length": sequence,
        "seed": seed,
        "steps": steps,
        "tokens": None,
        "evaluation": {},
    }
    values["optimizer"] |= {"eps": max(config.optimizer.eps, SMALLEST_EPSILON)}
    if config.optimizer.eps < SMALLEST_EPSILON:
        changes.append(
            f"optimizer.eps {config.optimizer.eps:g} -> {SMALLEST_EPSILON:g}, so that a gradient of pure rounding "
            "moves nothing"
        )
    return Problem(Config.model_validate(values), seed, steps, tuple(changes))


def _small_model(model: ModelConfig, changes: list[str]) -> ModelConfig:
    """Fewer layers and smaller widths, the same switches and proportions."""
    small: dict[str, int] = {}
    heads, group = model.num_attention_heads, model.num_attention_heads // model.num_key_value_heads
    if heads > MOST_HEADS:
        small["num_attention_heads"] = heads = MOST_HEADS
        small["num_key_value_heads"] = max(1, heads // group) if heads % max(1, heads // group) == 0 else 1
    head_dim = min(model.head_dim, MOST_HEAD_DIM)
    wide = model.hidden_size > MOST_HIDDEN or head_dim * heads < model.head_dim * model.num_attention_heads
    if wide:
        scale = heads * head_dim / (model.num_attention_heads * model.head_dim)
        small["head_dim"] = head_dim
        small["hidden_size"] = min(MOST_HIDDEN, 2 * round(model.hidden_size * scale / 2))
        small["intermediate_size"] = max(8, round(model.intermediate_size * small["hidden_size"] / model.hidden_size))
    small["num_hidden_layers"] = min(model.num_hidden_layers, MOST_LAYERS)
    small["vocab_size"] = model.vocab_size if model.vocab_size <= MOST_VOCABULARY else PRIME_VOCABULARY
    for name, value in small.items():
        if value != getattr(model, name):
            changes.append(f"model.{name} {getattr(model, name)} -> {value}")
    return model.model_copy(update=small)


def _without_dropout(model: ModelConfig, changes: list[str]) -> ModelConfig:
    dropouts = {name: 0.0 for name in ModelConfig.model_fields if name.endswith("_dropout") and getattr(model, name)}
    for name in dropouts:
        changes.append(f"model.{name} {getattr(model, name)} -> 0: transformers draws other masks than we do")
    return model.model_copy(update=dropouts)


def _sequence_length(config: Config, layouts: Sequence[Layout], changes: list[str], full: bool) -> int:
    """Short, and a multiple of every tensor-parallel size that cuts the sequence."""
    wanted = config.training.sequence_length
    parts = math.lcm(*(layout.tp for layout in layouts if layout.sequence_parallel))
    length = wanted if full else min(wanted, MOST_SEQUENCE)
    length = max(parts, length // parts * parts)
    if length != wanted:
        changes.append(f"training.sequence_length {wanted} -> {length}")
    return length
