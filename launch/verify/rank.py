"""One rank of one layout solving a problem with the real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launch.devices import Device
from launch.verify.layout import Layout
from launch.verify.observations import COPIES, Block, Quantity, around, by_step, whole
from launch.verify.problem import Batch, Problem, Training
from megalite.config import Config
from megalite.engine.engine import Engine, build_engine
from megalite.engine.state import moment_names, read_parameter, reading_gradients, refresh, write_parameter
from megalite.parallel.initialize import initialize_
from megalite.parallel.shard import Shard
from megalite.resilience.replicas import find_disagreements
from models.decoder import decoder_layers


def solve(rank: int, problem: Problem, layout: Layout, trainings: Sequence[Training]) -> list[Block]:
    """What this rank holds of every observation."""
    torch.set_float32_matmul_precision(problem.config.precision.float32_matmul_precision)
    blocks: list[Block] = []
    for training in trainings:
        engine = _engine(problem, layout, training)
        blocks += _train(engine, layout, training)
        engine.deepspeed.destroy()
    return blocks


def _engine(problem: Problem, layout: Layout, training: Training) -> Engine:
    """The layout's engine at the problem's initial weights."""
    config = layout.config(training.config)
    config = _as_if_large(config, training)
    device: Device = "cuda" if torch.cuda.is_initialized() else "cpu"
    engine = build_engine(
        decoder_layers(config.model, config.recompute.mode), config, config.check_world(layout.world_size, device)
    )
    for _, parameter in engine.parameters():
        shard: Shard = parameter.shard  # type: ignore[attr-defined]
        value = torch.empty(shard.local_shape)  # not read from the engine, which may have rounded it
        initialize_(value, shard, config.training.seed, config.model.initializer_range)
        for piece in shard.pieces():
            start = problem.initial_value(piece.name, value[piece.target].numpy(), piece.source, piece.shape)
            value[piece.target] = torch.from_numpy(start)
        write_parameter(parameter, {"weight": value.to(engine.deepspeed.device)})
    refresh(engine)
    return engine


def _as_if_large(config: Config, training: Training) -> Config:
    """DeepSpeed's sizes, where the user has not set them, such that this model is treated as a large one.

    A bucket holds about one matrix, so that there are many. ZeRO-3 partitions everything in one training, and keeps
    vectors whole in the other.
    """
    model = config.model
    values = config.model_dump(mode="json")
    sizes = values["deepspeed"].setdefault("zero_optimization", {})
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        sizes.setdefault(bucket, model.hidden_size * model.intermediate_size)
    if config.parallel.zero_stage == 3:
        kept = model.hidden_size if training.keeps_vectors_whole else 0
        sizes.setdefault("stage3_param_persistence_threshold", kept)
    return Config.model_validate(values)


def _train(engine: Engine, layout: Layout, training: Training) -> Iterator[Block]:
    """Evaluates, trains, evaluates again."""

    def quantity(kind: str) -> Quantity:
        return Quantity(training.name, kind)

    first = _micro_batches(engine, layout, training.batches[0])
    yield from _forward(engine, layout, first, training)
    before = float(engine.evaluate(_held(engine, first), layout.accumulation))
    losses, norms = [], []
    gradients: list[Block] = []
    take = partial(_keep_gradient, gradients, quantity("gradient"))
    for step, batch in enumerate(training.batches):
        micro_batches = _held(engine, _micro_batches(engine, layout, batch))
        with reading_gradients(engine, take) if step == 0 else nullcontext():
            result = engine.train_step(micro_batches, training.learning_rate(step))
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    yield from whole(quantity(COPIES), {str(copy): np.ones(1) for copy in find_disagreements(engine)})
    after = float(engine.evaluate(_held(engine, first), layout.accumulation))
    yield from gradients
    yield from whole(quantity("loss"), by_step(losses))
    yield from whole(quantity("gradient norm"), by_step(norms))
    yield from whole(quantity("evaluation loss"), around(before, after))
    moments = moment_names(engine)
    for _, parameter in engine.parameters():
        for kind, value in read_parameter(parameter, moments).items():
            yield from _pieces(quantity(kind), parameter, value)


def _keep_gradient(blocks: list[Block], quantity: Quantity, parameter: nn.Parameter, gradient: Tensor) -> None:
    blocks.extend(_pieces(quantity, parameter, gradient))


def _pieces(quantity: Quantity, parameter: nn.Parameter, value: Tensor) -> Iterator[Block]:
    value = value.detach().float().cpu()
    for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
        yield Block(quantity, piece.name, piece.shape, piece.source, value[piece.target].numpy().copy())


def _rows(engine: Engine, layout: Layout, batch: Batch) -> list[slice]:
    """Rows of a global batch in each of this replica's micro-batches."""
    size = len(batch.tokens) // (layout.dp * layout.accumulation)
    first = engine.coordinate.data_rank * layout.accumulation
    return [slice((first + i) * size, (first + i + 1) * size) for i in range(layout.accumulation)]


def _micro_batches(engine: Engine, layout: Layout, batch: Batch) -> list[Batch]:
    return [batch.rows(rows) for rows in _rows(engine, layout, batch)]


def _held(engine: Engine, micro_batches: list[Batch]) -> list[Batch]:
    """What this rank feeds its engine."""
    return micro_batches if engine.needs_data else []


def _forward(engine: Engine, layout: Layout, micro_batches: list[Batch], training: Training) -> Iterator[Block]:
    """Every layer's output and the logits, of the first batch at the initial weights."""
    batch = training.batches[0]
    rows_of = _rows(engine, layout, batch)
    sequence, tp = batch.tokens.shape[1], engine.coordinate.tensor_rank
    outputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(_keep(outputs, str(module.layer_name)))
        for module in engine.deepspeed.module.modules()
        if hasattr(module, "layer_name")
    ]
    for rows, micro_batch in zip(rows_of, micro_batches, strict=True):
        outputs.clear()
        logits = engine.logits(micro_batch if engine.needs_data else None)
        for name, hidden in outputs.items():
            length = hidden.shape[1]
            cut = slice(tp * length, (tp + 1) * length) if length < sequence else slice(0, sequence)
            shape = (len(batch.tokens), sequence, hidden.shape[2])
            where = (rows, cut, slice(0, shape[2]))
            yield Block(Quantity(training.name, "activation"), name, shape, where, hidden.float().cpu().numpy())
        if logits is not None:
            shape = (len(batch.tokens), sequence, logits.shape[2])
            where = (rows, slice(0, sequence), slice(0, shape[2]))
            yield Block(Quantity(training.name, "logits"), "logits", shape, where, logits.float().cpu().numpy())
    for hook in hooks:
        hook.remove()


def _keep(outputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_: nn.Module, __: Any, output: Any) -> None:
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if not any(other.is_floating_point() for other in others):  # a head passes hidden states and its weight
            outputs[name] = hidden.detach().clone()

    return keep
