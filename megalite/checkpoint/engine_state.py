"""Stores and loads the state of a training engine, on any layout.

Every rank hands over and takes back the fp32 numbers that its own optimizer updates (ZeRO's fragments), as blocks of
global tensors: nothing is gathered, so a save needs no memory beyond the copy of what the rank holds anyway. Moments
of another format are stored in fp32, so that a run may go on with either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import WEIGHT, entry
from megalite.checkpoint.reader import CheckpointReader, WeightReader
from megalite.checkpoint.writer import Block
from megalite.engine.compression.gradients import CompressedReducer
from megalite.engine.deepspeed.internals import own_range, owned_fp32_values
from megalite.engine.deepspeed.loss_scale import set_loss_scaler_state
from megalite.engine.engine import Engine
from megalite.engine.optimizers.build import MOMENTS, moments_of
from megalite.engine.parameter_state import create_moments, moment_names, refresh, write_own_numbers, written_range
from megalite.parallel.adapters import is_factor
from megalite.parallel.expert_balance import BIAS
from megalite.parallel.shard import RangePiece

log = logging.getLogger(__name__)
UNTOLD = "untold"  # kind of what `compression.gradients` has left out of messages so far


class OwnState(NamedTuple):
    """The part of a checkpoint that one rank contributes."""

    blocks: list[Block]  # views of the live state
    shapes: dict[str, tuple[int, ...]]  # global, of their tensors
    other_moments: dict[str, tuple[str, ...]]  # `Manifest.other_moments`


def own_blocks(engine: Engine) -> OwnState:
    """Returns what this rank contributes to a checkpoint.

    Of numbers that several ranks hold alike, the first tensor-parallel rank contributes replicated parameters.
    """
    moments, optimizer = moment_names(engine), engine.config.optimizer.name
    blocks: list[Block] = []
    shapes: dict[str, tuple[int, ...]] = {}
    others: dict[str, tuple[str, ...]] = {}
    untold = engine.reducer.mean_untold() if isinstance(engine.reducer, CompressedReducer) else {}
    for parameter, pieces in _own_pieces(engine):
        own = moments_of(parameter, optimizer) if moments else ()
        if parameter in untold:
            blocks += [Block(entry(UNTOLD, each.name, each.source), each.of(untold[parameter])) for each in pieces]
            others |= {piece.name: (*own, UNTOLD) for piece in pieces}
        elif own != moments:
            others |= {piece.name: own for piece in pieces}
        for kind in (WEIGHT, *own):
            numbers = _own_numbers(engine, parameter, kind)
            blocks += [Block(entry(kind, piece.name, piece.source), piece.of(numbers)) for piece in pieces]
        shapes |= {piece.name: piece.shape for piece in pieces}
    for name, bias in _own_biases(engine):
        blocks.append(Block(entry(WEIGHT, name, (slice(0, len(bias)),)), bias))
        shapes[name], others[name] = (len(bias),), ()
    return OwnState(blocks, shapes, others)


def own_size(engine: Engine) -> tuple[int, torch.device]:
    """Returns how many numbers `own_blocks` has after the first optimizer step, and their device.

    One parameter is read at a time: reading those that are offloaded to NVMe copies them to the GPU.
    """
    count, device = 0, torch.device("cpu")
    for parameter, pieces in _own_pieces(engine):
        numbers = _own_numbers(engine, parameter, WEIGHT)
        kinds = 1 + len(moments_of(parameter, engine.config.optimizer.name))
        kinds += isinstance(engine.reducer, CompressedReducer) and parameter.requires_grad
        count += kinds * sum(piece.of(numbers).numel() for piece in pieces)
        device = numbers.device
    return count + sum(len(bias) for _, bias in _own_biases(engine)), device


def _own_pieces(engine: Engine) -> Iterator[tuple[nn.Parameter, list[RangePiece]]]:
    """Yields the parameters that this rank contributes, each with the blocks of its part."""
    for _, parameter in engine.parameters():
        shard = parameter.shard  # type: ignore[attr-defined]
        start, stop = _own_range(engine, parameter)
        if start < stop and not (shard.is_replicated and engine.coordinate.tensor_rank):
            yield parameter, list(shard.pieces_of_range(start, stop))


def _own_range(engine: Engine, parameter: nn.Parameter) -> tuple[int, int]:
    """Returns the range of the flattened local parameter that this rank contributes: what its optimizer updates, and
    an equal part of a frozen parameter, which every replica holds whole, of dealt experts every one that has these."""
    if parameter.requires_grad:
        return own_range(parameter)
    size, sharing = parameter.numel(), parameter.shard.expert_parallel_size  # type: ignore[attr-defined]
    length = -(-size * sharing // engine.mesh.replicas)
    start = min(size, length * (engine.coordinate.replica // sharing))
    return start, min(size, start + length)


def _own_numbers(engine: Engine, parameter: nn.Parameter, kind: str) -> Tensor:
    """Returns the values of that range, flat: the optimizer's fp32 ones, or a frozen weight's, as it computes."""
    if parameter.requires_grad:
        return owned_fp32_values(parameter, kind)
    start, stop = _own_range(engine, parameter)
    return parameter.detach().flatten()[start:stop]


def _own_biases(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yields the biases of experts that this rank contributes: the first of those that hold a layer."""
    if engine.expert_bias is not None and engine.coordinate.tensor_rank == engine.coordinate.replica == 0:
        yield from engine.expert_bias.named()


def load_engine(engine: Engine, reader: WeightReader, *, weights_only: bool) -> None:
    """Loads this rank's weights, and the state of optimizer and loss scale unless `weights_only`, from its blocks of
    what `reader` reads.

    Collective. Raises CheckpointError where that is of another model. Only a CheckpointReader reads more than weights.
    With `weights_only` adapters keep their initial values: they begin beside what the reader holds.
    """
    checkpoint = None
    if not weights_only:
        assert isinstance(reader, CheckpointReader), "there is no optimizer state in a Hugging Face folder"
        checkpoint = reader
    moments = _prepare_moments(engine, checkpoint) if checkpoint is not None else ()
    for _, parameter in engine.parameters():
        shard = parameter.shard  # type: ignore[attr-defined]
        if weights_only and is_factor(shard.name):
            continue
        for piece in shard.pieces():
            stored = reader.shapes.get(piece.name, piece.shape)
            if stored != piece.shape:
                raise CheckpointError(
                    f"{reader.folder}: {piece.name} has shape {list(stored)}, but the model of this config needs "
                    f"{list(piece.shape)}"
                )
        pieces = list(shard.pieces_of_range(*written_range(parameter)))
        own = moments_of(parameter, engine.config.optimizer.name) if moments else ()
        for kind in (WEIGHT, *own):
            fill = partial(_fill, reader, pieces, kind, parameter.dtype, weights_only)
            write_own_numbers(parameter, kind, fill)
        engine.activity.progress()
    refresh(engine)
    _load_untold(engine, checkpoint)
    _load_biases(engine, reader)
    if checkpoint is not None:
        set_loss_scaler_state(engine.deepspeed.optimizer, checkpoint.manifest.loss_scaler)


def _fill(
    reader: WeightReader, pieces: list[RangePiece], kind: str, dtype: torch.dtype, weights_only: bool, numbers: Tensor
) -> None:
    """Reads pieces of a parameter that computes in `dtype`. Raises CheckpointError for numbers that do not compute."""
    for piece in pieces:
        loaded = piece.of(numbers)
        reader.fill(loaded, piece.name, piece.source, kind)
        if kind != WEIGHT or bool(torch.stack(loaded.aminmax()).to(dtype).isfinite().all()):
            continue
        stored = torch.empty(loaded.shape)  # `loaded` is of another format where the parameter is frozen
        reader.fill(stored, piece.name, piece.source)
        largest, limit = float(stored.flatten()[stored.abs().argmax()]), torch.finfo(dtype).max
        where = f"{reader.folder}: {piece.name} holds"
        if limit < abs(largest) < math.inf:
            raise CheckpointError(
                f"{where} {largest:g}, and fp16 ends at {limit:g}: set precision.dtype to bf16 or fp32"
            )
        if weights_only and not math.isfinite(largest):
            raise CheckpointError(
                f"{where} NaN or infinite numbers, from which no step can begin: give intact weights as "
                "training.initialize_from"
            )


def _load_untold(engine: Engine, checkpoint: CheckpointReader | None) -> None:
    """Loads what messages had left out of gradients, which a run without codes drops."""
    kinds = {} if checkpoint is None else checkpoint.manifest.other_moments
    holding = {name for name, others in kinds.items() if UNTOLD in others}

    def fill(parameter: nn.Parameter, part: Tensor) -> None:
        for piece in parameter.shard.pieces_of_range(*own_range(parameter)):  # type: ignore[attr-defined]
            if checkpoint is not None and piece.name in holding:
                checkpoint.fill(piece.of(part), piece.name, piece.source, UNTOLD)

    if isinstance(engine.reducer, CompressedReducer):
        engine.reducer.take_untold(fill, is_first=engine.coordinate.tensor_rank == 0)
    elif checkpoint is not None and holding and dist.get_rank() == 0:
        log.info(
            f"compression.gradients none: what messages had left out of gradients in {checkpoint.folder} is dropped"
        )


def _load_biases(engine: Engine, reader: WeightReader) -> None:
    """Loads the biases of experts; zeros from what has none, such as a run without `training.router.bias_rate`."""
    is_stored = any(name.endswith(BIAS) for name in reader.shapes)
    if is_stored != bool(engine.config.training.router.bias_rate) and dist.get_rank() == 0:
        what = "a bias of the experts' choice: it stays, as bias_rate is 0" if is_stored else "no bias: it begins at 0"
        log.info(f"training.router.bias_rate: {reader.folder} holds {what}")
    if is_stored:
        engine.bias_experts()
    if engine.expert_bias is None:
        return
    for name, bias in engine.expert_bias.named():
        bias.zero_()
        if is_stored:
            reader.fill(bias, name, (slice(0, len(bias)),))


def _prepare_moments(engine: Engine, reader: CheckpointReader) -> tuple[str, ...]:
    """Allocates the moments of a checkpoint and returns their names."""
    manifest = reader.manifest
    moments, known = manifest.moments, MOMENTS[engine.config.optimizer.name]
    if moments not in ((), known):
        raise CheckpointError(
            f"{reader.folder}: holds {', '.join(moments)} after {manifest.optimizer_steps} optimizer steps, but "
            f"{engine.config.optimizer.name} keeps {', '.join(known) or 'none'}"
        )
    if moments:
        create_moments(engine, manifest.optimizer_steps)  # of no steps, if all so far were skipped on the device
    else:
        # saved before the first step: a live engine that goes back to it has none either
        engine.torch_optimizer.state.clear()
    return moments
