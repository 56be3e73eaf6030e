"""Solves a problem on one rank of one layout, with the real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from launch.parity.layout import ParityLayout
from launch.parity.micro_batch_gradients import MicroBatchGradients
from launch.parity.observations import (
    COPIES,
    REDUCTION,
    SOURCE_LOSS,
    ArrayBlock,
    Quantity,
    around,
    by_source,
    by_step,
    whole,
)
from launch.parity.problem import Batch, ParityProblem, Training
from launch.reference.models import layer_outputs
from launch.runtime.devices import Device
from megalite.config import Config, resolve_layout
from megalite.config.batch_stages import shapes_of
from megalite.engine.build import build_engine
from megalite.engine.engine import Engine
from megalite.engine.optimizers.build import moments_of
from megalite.engine.parameter_state import moment_names, read_parameter, reading_gradients, refresh, write_weight
from megalite.parallel.context import own_places, sequence_places
from megalite.parallel.layers import initialize_
from megalite.parallel.shard import Shard
from megalite.planner.cost.stage_parameters import recompute_of_blocks
from megalite.resilience.replica_check import find_disagreements
from models.decoder import layers_of


def solve(rank: int, problem: ParityProblem, layout: ParityLayout, trainings: Sequence[Training]) -> list[ArrayBlock]:
    """Returns this rank's blocks of every observation."""
    torch.set_float32_matmul_precision(problem.config.precision.float32_matmul_precision)
    blocks: list[ArrayBlock] = []
    for training in trainings:
        engine = _engine(problem, layout, training)
        blocks += _train(engine, layout, training)
        engine.deepspeed.destroy()
    return blocks


def _engine(problem: ParityProblem, layout: ParityLayout, training: Training) -> Engine:
    """Builds the layout's engine at the problem's initial weights."""
    config = _partitioned_as_if_large(layout.config(training.config), training)
    device: Device = "cuda" if torch.cuda.is_initialized() else "cpu"
    resolved = resolve_layout(config, layout.world_size, device)
    engine = build_engine(layers_of(config, recompute_of_blocks(config, resolved)), config, resolved)
    for _, parameter in engine.parameters():
        shard: Shard = parameter.shard  # type: ignore[attr-defined]
        value = torch.empty(shard.local_shape)  # not read from the engine, which may have rounded it
        initialize_(value, shard, config.training.seed, config.model.initializer_range)
        for piece in shard.pieces():
            start = problem.initial_value(piece.name, value[piece.target].numpy(), piece.source, piece.shape)
            value[piece.target] = torch.from_numpy(start)
        write_weight(parameter, value.to(engine.deepspeed.device))
    refresh(engine)
    return engine


def _partitioned_as_if_large(config: Config, training: Training) -> Config:
    """Makes ZeRO-3 partition everything in one training and keep vectors whole in the other, unless the user has said
    what it keeps."""
    if config.parallel.zero_stage < 3:
        return config
    values = config.model_dump(mode="json")
    sizes = values["deepspeed"].setdefault("zero_optimization", {})
    kept = config.model.hidden_size if training.keeps_vectors_whole else 0
    sizes.setdefault("stage3_param_persistence_threshold", kept)
    return Config.model_validate(values)


def _train(engine: Engine, layout: ParityLayout, training: Training) -> Iterator[ArrayBlock]:
    """Evaluates, trains and evaluates again; yields the observations."""

    def quantity(kind: str, step: int = 1) -> Quantity:
        return Quantity(training.name, kind, step)

    shapes = shapes_of(engine.config.training)
    first = _fed(engine, layout.accumulation, training.batches[0])
    yield from _forward(engine, layout, training)
    before = float(engine.evaluate(first, layout.accumulation))
    losses, norms = [], []
    of_steps: list[ArrayBlock] = []

    def take(number: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        of_steps.extend(_pieces(quantity("gradient", number), parameter, gradient))

    def compare(number: int, backward: MicroBatchGradients, parameter: nn.Parameter, gradient: Tensor) -> None:
        errors = backward.errors(parameter, gradient)
        of_steps.extend(_largest(quantity(REDUCTION, number), parameter, errors, layout.world_size))

    for step, batch in enumerate(training.batches):
        engine.use_shape(shapes[training.shape(step)])
        micro_batches = _fed(engine, training.micro_batches(layout.accumulation, step), batch)
        with ExitStack() as watched:
            if step == 0 or training.is_deep:
                watched.enter_context(reading_gradients(engine, partial(take, step + 1)))
            if step == min(1, len(training.batches) - 1) or (step and training.is_deep):
                backward = MicroBatchGradients(engine)  # has each gradient made apart: not in step 1
                watched.enter_context(backward.watching())
                number = step + 1 if training.is_deep else 1
                watched.enter_context(reading_gradients(engine, partial(compare, number, backward)))
            result = engine.train_step(micro_batches, training.learning_rate(step))
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        if batch.sources is not None and result.readback.source_losses is not None:
            means = by_source(*result.readback.source_losses.numpy())
            of_steps.extend(whole(quantity(SOURCE_LOSS, step + 1), means))
    yield from whole(quantity(COPIES), {str(copy): np.ones(1) for copy in find_disagreements(engine)})
    after = float(engine.evaluate(first, layout.accumulation))
    yield from of_steps
    yield from whole(quantity("loss"), by_step(losses))
    yield from whole(quantity("gradient norm"), by_step(norms))
    yield from whole(quantity("evaluation loss"), around(before, after))
    moments = moment_names(engine)
    for _, parameter in engine.parameters():
        own = moments_of(parameter, training.config.optimizer.name) if moments else ()
        for kind, value in read_parameter(parameter, own).items():
            yield from _pieces(quantity(kind), parameter, value)


def _pieces(quantity: Quantity, parameter: nn.Parameter, value: Tensor) -> Iterator[ArrayBlock]:
    value = value.detach().float().cpu()
    for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
        yield ArrayBlock(quantity, piece.name, piece.shape, piece.source, value[piece.target].numpy().copy())


def _largest(quantity: Quantity, parameter: nn.Parameter, errors: Tensor, ranks: int) -> Iterator[ArrayBlock]:
    """Yields the largest error of each part of a parameter, as this rank's entry of an array `[ranks]`."""
    largest: dict[str, float] = {}
    for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
        error = float(errors[piece.target].cpu().numpy().max(initial=0.0))
        largest[piece.name] = max(error, largest.get(piece.name, 0.0))
    mine = dist.get_rank()
    for name, error in largest.items():
        yield ArrayBlock(quantity, name, (ranks,), (slice(mine, mine + 1),), np.array([error]))


def _rows(engine: Engine, count: int, batch: Batch) -> list[slice]:
    """Returns the rows of a global batch in each of this replica's `count` micro-batches."""
    size = len(batch.tokens) // (engine.mesh.data_parallel_size * count)
    first = engine.coordinate.data_rank * count
    return [slice((first + i) * size, (first + i + 1) * size) for i in range(count)]


def _fed(engine: Engine, count: int, batch: Batch) -> list[Batch]:
    """Returns the micro-batches that this rank passes to its engine."""
    return [batch.rows(rows) for rows in _rows(engine, count, batch)] if engine.needs_data else []


def _forward(engine: Engine, layout: ParityLayout, training: Training) -> Iterator[ArrayBlock]:
    """Yields every layer's output and the logits, for the first batch at the initial weights."""
    batch = training.batches[0]
    sequence, tp = batch.tokens.shape[1], engine.deepspeed.module.tensor_parallel
    with layer_outputs(engine.deepspeed.module, training.config.model) as outputs:
        for rows in _rows(engine, layout.accumulation, batch):
            outputs.clear()
            logits = engine.logits(batch.rows(rows))
            observed = [("activation", name, hidden) for name, hidden in outputs.items()]
            observed += [] if logits is None else [("logits", "logits", logits)]
            for kind, name, value in observed:
                shape, numbers = (len(batch.tokens), sequence, value.shape[2]), value.float().cpu().numpy()
                is_cut = value.shape[1] * tp.sequence_parts == sequence  # logits are not, by sequence parallelism
                places = own_places(value.shape[1], tp) if is_cut else sequence_places(sequence, tp.context)
                for at in np.split(np.arange(len(places)), np.flatnonzero(places.diff() != 1) + 1):
                    where = rows, slice(int(places[at[0]]), int(places[at[-1]]) + 1), slice(0, shape[2])
                    yield ArrayBlock(Quantity(training.name, kind), name, shape, where, numbers[:, at])
