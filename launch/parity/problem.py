"""The problem that every layout and the reference solve: a small model, fresh random batches, two short trainings.

In: the user's config and the layouts. Out: a `ParityProblem`, pure data that is sent to ranks. Does not import torch.

The two trainings catch different bugs. The config's own optimizer (AdamW) divides each gradient by its own size and so
hides one that was reduced twice or not at all, but shows moments, bias correction and decay groups. Plain SGD shows the
gradient's scale in every weight, and the global norm, because its clip is active at some steps and not at others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from launch.errors import LaunchError
from launch.parity.layout import ParityLayout, micro_batches
from launch.parity.small_model import small_model
from megalite.config import Config, ModelConfig
from megalite.config.batch_stages import sample_length, shapes_of
from megalite.config.model import DROPOUTS

Dtype = Literal["fp64", "fp32", "bf16", "fp16", "float8"]  # float8: products, in the config's format otherwise
FP16_SCALE_POWER = 12  # log2 of the loss scale: so small that nothing overflows and no step is skipped
MOST_SEQUENCE, MOST_ROWS = 96, 256  # one and a half tiles of 64, which attention kernels have
ROWS = 12  # sequences in a global batch, about
DENSE, SPARSE = 0.75, 0.05  # fraction of tokens with a loss; fewer mean a noisier gradient, and so a larger norm
SMALLEST_EPSILON = 1e-5
LEARNING_RATES = 1e-4, 3e-3  # below, a step is lost in rounding; above, twenty are chaos
RATE_FACTORS = 1.0, 0.5, 0.75  # of the learning rate, step after step, as a schedule would
SGD_DECAY = 0.01  # fraction of a matrix per step


@dataclass(frozen=True)
class Batch:
    """A global batch, or the rows of it that one micro-batch holds."""

    tokens: np.ndarray  # [rows, seq] int64
    targets: np.ndarray  # [rows, seq] int64, -100: no loss
    positions: np.ndarray | None  # [rows, seq] int64, 0 at the start of each packed document
    samples: np.ndarray  # [rows] int64, positions of the samples in the data
    sources: np.ndarray | None = None  # [rows] int64, places of their sources in a mix
    global_valid_targets: int | None = None  # the replicas count them

    def rows(self, which: slice) -> Batch:
        arrays = (self.tokens, self.targets, self.positions, self.samples, self.sources)
        return Batch(*(None if array is None else array[which] for array in arrays))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Training:
    """One short training from the initial weights."""

    name: str
    config: Config
    batches: tuple[Batch, ...]
    keeps_vectors_whole: bool  # under ZeRO-3: the other training partitions everything
    is_deep: bool = False  # gradients are compared in every step

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        return self.config.optimizer.learning_rate * RATE_FACTORS[step % len(RATE_FACTORS)]

    def micro_batches(self, accumulation: int, step: int) -> int:
        """Returns those of a step on a replica, in a layout that has `accumulation` of them in the first step."""
        return micro_batches(self.config.training, accumulation)[self.shape(step)]

    def shape(self, step: int) -> int:
        """Returns which of the config's batch shapes a step has: each in turn, and the last one to the end."""
        return min(step, len(self.config.training.stages))


@dataclass(frozen=True)
class ParityProblem:
    """The config made small, and the seed of its batches."""

    config: Config
    seed: int
    steps: int
    changes: tuple[str, ...] = ()  # differences from the user's config, a phrase each
    draw: int = 0  # counts draws of the batches, if the first was not good enough
    scales: Mapping[str, float] = field(default_factory=dict)  # end of a weight's name -> factor on its initial value
    is_deep: bool = False
    mixes: tuple[tuple[float, ...], ...] = ()  # weights of the sources, sorted by name, in each stage of the data

    def training(self) -> Training:
        """Returns the training with the config's optimizer and clip, on packed documents."""
        return Training(self.config.optimizer.name, self._config(True), self._batches("packed"), False, self.is_deep)

    def sgd(self, learning_rate: float, clip: float) -> Training:
        """Returns the training with plain SGD, on sequences of one document; every second batch has few tokens with a
        loss."""
        decay = float(f"{SGD_DECAY / learning_rate:.2g}")
        optimizer = {"name": "sgd", "learning_rate": learning_rate, "weight_decay": decay}
        config = self._config(False, optimizer=optimizer, training={"gradient_clipping": clip})
        return Training("sgd-under-clip", config, self._batches("whole"), True, self.is_deep)

    def _config(self, document_mask: bool, **changes: dict[str, Any]) -> Config:
        values = self.config.model_dump(mode="json")
        for section, options in (changes | {"data": {"document_mask": document_mask}}).items():
            values[section] = options if section == "optimizer" else values[section] | options
        return Config.model_validate(values)

    def _batches(self, kind: str) -> tuple[Batch, ...]:
        draw = np.random.default_rng([self.seed, *f"{kind}{self.draw or ''}".encode()])
        return tuple(self._batch(draw, kind, step) for step in range(self.steps))

    def _batch(self, draw: np.random.Generator, kind: str, step: int) -> Batch:
        shapes, vocabulary = shapes_of(self.config.training), self.config.model.vocab_size
        one = shapes[min(step, len(shapes) - 1)]
        shape = one.global_batch_size, one.sequence_length
        tokens, targets = draw.integers(0, vocabulary, shape), draw.integers(0, vocabulary, shape)
        # rows have different numbers of valid tokens, so that a mean of means is wrong
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
        samples, sources = step * shape[0] + np.arange(shape[0]), None
        if self.mixes:
            mix = np.array(self.mixes[min(step, len(self.mixes) - 1)])
            sources = draw.choice(len(mix), shape[0], p=mix / mix.sum())
        return Batch(tokens, targets, positions, samples, sources)

    def initial_value(self, name: str, value: np.ndarray, where: tuple[slice, ...], shape: tuple[int, ...]) -> Any:
        """Returns the initial value of a block of the weight `name`, given that of an ordinary run, `value`.

        Norms and biases do not start at ones and zeros, which would hide a decay or a scale.
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
    config: Config,
    layouts: Sequence[ParityLayout],
    *,
    seed: int,
    steps: int,
    full: bool,
    keep_dropout: bool = False,
    counts: Sequence[int] = (),
) -> ParityProblem:
    """Builds the problem that all `layouts` solve: one model, one global batch, or the batches of all stages.

    counts: for a deep problem the micro-batches of a step on a replica of the config's own layout, in each batch shape.
    Raises LaunchError if no batch of reasonable size can be cut by all of them, or if there is nothing to learn.
    """
    changes: list[str] = []
    sequence_length = _sequence_length(config, layouts, changes, full, len(counts) > 1)
    model = config.model if full else small_model(config.model, layouts, sequence_length, changes)
    if not keep_dropout:
        dropouts = {name: getattr(model, name) for name in DROPOUTS if getattr(model, name)}
        because = "because transformers draws other masks than we do"
        changes += [f"model.{name} {value} -> 0, {because}" for name, value in dropouts.items()]
        model = model.model_copy(update=dict.fromkeys(dropouts, 0.0))
    if model.vocab_size == 1:
        raise LaunchError("model.vocab_size 1 has nothing to verify, its loss is always 0: use 2 tokens or more")
    # at 0.02 a narrow model's attention is uniform, and a wrong rotation or mask has no effect
    spread = float(f"{max(model.initializer_range, 1 / math.sqrt(model.hidden_size)):.2g}")
    _note_change(changes, "model.initializer_range", model.initializer_range, spread)
    model = model.model_copy(update={"initializer_range": spread})
    values = config.model_dump(mode="json")
    values["model"] = model.model_dump(mode="json")
    # the other options of these sections are those of a layout, not of the problem
    if config.adapter.name != "none":
        changes.append("adapter.name lora -> none: the model itself is trained, as transformers trains it")
        values["adapter"] = {}
    values |= {"parallel": {"gradient_bucket_size": _bucket_size(config, model)}, "recompute": {}}
    for option, coefficient in config.training.router:
        if coefficient:
            what = "bias" if option == "bias_rate" else "loss"
            changes.append(f"training.router.{option} {coefficient} -> 0, because transformers has no such {what}")
    if config.training.stages and not counts:
        changes.append("training.stages -> [], because one batch is compared, as that at the start of the run")
    mixes = _mixes(config) if counts else ()
    if counts:
        if steps < (needed := max(len(counts), len(mixes))):
            changes.append(f"steps {steps} -> {needed}, so that each stage of the batch and of the data has one")
        steps = max(steps, needed)
    first, *stages = _batches(config, layouts, counts or (1,), sequence_length)
    values["training"] |= {
        **first,
        "seed": seed,
        "steps": steps,
        "tokens": None,
        "router": {},
        "evaluation": {},
        "stages": [{"from_steps": step, **batch} for step, batch in enumerate(stages, start=1)],
    }
    # numbers of samples are made for the run's own batch, and weights are in the batches
    sources = {name: {"path": source.path, "weight": 1.0} for name, source in config.data.sources.items()}
    values["data"] |= {"validation": {}, "sources": sources, "stages": [], "packing": "concat"}
    values["optimizer"] |= _optimizer(config, changes)
    precise = "highest"  # the other settings round float32 products to tf32 or bf16 on a GPU
    _note_change(changes, "precision.float32_matmul_precision", config.precision.float32_matmul_precision, precise)
    values["precision"] |= {"float32_matmul_precision": precise}
    made = Config.model_validate(values)
    return ParityProblem(made, seed, steps, tuple(changes), is_deep=bool(counts), mixes=mixes)


def _batches(
    config: Config, layouts: Sequence[ParityLayout], counts: Sequence[int], sequence_length: int
) -> list[dict[str, int]]:
    """Returns the options of the batch in each shape: as few sequences as all layouts can cut, or about `ROWS`."""
    batches = []
    for shape, own in zip(shapes_of(config.training), counts, strict=False):
        cut = [each.dp * (own if each.accumulation == counts[0] else each.accumulation) for each in layouts]
        parts = shape.parts if len(counts) > 1 else 1
        rows = math.lcm(own, parts, *cut)
        if rows > MOST_ROWS:
            raise LaunchError(
                f"--layouts: only a global batch of {rows} sequences can be cut by all of them: verify those with "
                "large dp or accumulation apart, and with --deep a smaller training.global_batch_size"
            )
        rows *= -(-ROWS // rows)
        size = {"global_batch_size": rows, "micro_batch_size": rows // own}
        batches.append(size | {"sequence_length": sequence_length // parts})
    return batches


def _mixes(config: Config) -> tuple[tuple[float, ...], ...]:
    """Returns the weights of the sources, sorted by name, at the start and in each stage of the data; equal ones where
    they read epochs. Where all are 0, nothing is read."""
    data = config.data
    own = {name: 1.0 if data.is_by_epochs else source.weight or 0.0 for name, source in sorted(data.sources.items())}
    stages = [own, *({**own, **stage.weights} for stage in data.stages)] if own else []
    return tuple(tuple(stage[name] for name in own) for stage in stages if any(stage.values()))


def _bucket_size(config: Config, model: ModelConfig) -> int:
    """Returns the bucket that the user has set; else one of about a matrix, so that there are many."""
    if "gradient_bucket_size" in config.parallel.model_fields_set:
        return config.parallel.gradient_bucket_size
    return model.hidden_size * model.intermediate_size


def _note_change(changes: list[str], option: str, before: Any, after: Any) -> None:
    if before != after:
        changes.append(f"{option} {before} -> {after}")


def _optimizer(config: Config, changes: list[str]) -> dict[str, Any]:
    """Returns the options that must change so that rounding does not decide the result."""
    options = config.optimizer
    rate = min(max(options.learning_rate, LEARNING_RATES[0]), LEARNING_RATES[1])
    _note_change(changes, "optimizer.learning_rate", options.learning_rate, rate)
    if options.name == "sgd":
        return {"learning_rate": rate}
    epsilon = max(options.eps, SMALLEST_EPSILON)
    _note_change(changes, "optimizer.eps", options.eps, epsilon)
    return {"learning_rate": rate, "eps": epsilon}


def _sequence_length(
    config: Config, layouts: Sequence[ParityLayout], changes: list[str], full: bool, with_stages: bool
) -> int:
    """Returns a short length, of stages the longest, that every layout can cut, if the model allows it."""
    wanted, longest = config.training.sequence_length, config.model.max_position_embeddings
    parts = math.lcm(*(each.tp**each.sequence_parallel * (2 * each.cp if each.cp > 1 else 1) for each in layouts))
    if with_stages:
        wanted, parts = sample_length(config.training), parts * math.lcm(*(s.parts for s in shapes_of(config.training)))
    length = min(longest, wanted if full else min(wanted, MOST_SEQUENCE))
    if parts <= longest:
        length = max(parts, length // parts * parts)
    reason = f" (cut in {parts})" if parts > 1 and length % parts == 0 else ""
    _note_change(changes, "training.sequence_length", wanted, f"{length}{reason}" if length != wanted else wanted)
    return length
