"""A training engine's state to and from a checkpoint, on any layout.

Every rank hands over and takes back the fp32 numbers that its own optimizer updates (ZeRO's fragments), as blocks of
global tensors: nothing is gathered, so a save needs no memory beyond the copy of what the rank holds anyway.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import WEIGHT, entry
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.writer import Block
from megalite.engine.engine import Engine
from megalite.engine.seams import own_numbers, own_range, set_loss_scaler_state, tied_weights
from megalite.engine.state import create_moments, forget_moments, moment_names, refresh, write_own_numbers
from megalite.parallel.shard import RangePiece


def own_blocks(engine: Engine) -> tuple[list[Block], dict[str, tuple[int, ...]]]:
    """What this rank contributes to a checkpoint, as views of the live state, and the global shapes of its tensors.

    Of numbers that several ranks hold alike, the first tensor-parallel rank contributes replicated parameters, and the
    first stage a tied weight: the others follow its copy, and their masters and moments differ by rounding.
    """
    moments = moment_names(engine)
    tied = tied_weights(engine.deepspeed.module)
    copies = {weight for weight, group in tied if dist.get_group_rank(group, dist.get_rank()) > 0}
    blocks: list[Block] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for _, parameter in engine.parameters():
        shard = parameter.shard  # type: ignore[attr-defined]
        start, stop = own_range(parameter)
        if start == stop or (shard.is_replicated and engine.coordinate.tensor_rank) or parameter in copies:
            continue
        pieces = list(shard.pieces_of_range(start, stop))
        for kind in (WEIGHT, *moments):
            numbers = own_numbers(parameter, kind)
            blocks += [Block(entry(kind, piece.name, piece.source), piece.of(numbers)) for piece in pieces]
        shapes |= {piece.name: piece.shape for piece in pieces}
    return blocks, shapes


def load_engine(engine: Engine, reader: CheckpointReader, *, weights_only: bool) -> None:
    """Fills this rank's weights, and optimizer state unless `weights_only`, with its blocks of the checkpoint.

    Collective. Raises CheckpointError where the checkpoint is of another model.
    """
    manifest = reader.manifest
    moments = () if weights_only else manifest.moments
    if moments:
        create_moments(engine, manifest.optimizer_steps)
    elif not weights_only:
        forget_moments(engine)  # saved before the first step: a live engine that goes back to it has none either
    for _, parameter in engine.parameters():
        shard = parameter.shard  # type: ignore[attr-defined]
        for piece in shard.pieces():
            stored = manifest.tensors.get(piece.name, piece.shape)
            if stored != piece.shape:
                raise CheckpointError(
                    f"{reader.folder}: {piece.name} has shape {list(stored)}, but the model of this config needs "
                    f"{list(piece.shape)}"
                )
        pieces = list(shard.pieces_of_range(*own_range(parameter)))
        for kind in (WEIGHT, *moments):

            def fill(numbers: Tensor, kind: str = kind, pieces: list[RangePiece] = pieces) -> None:
                for piece in pieces:
                    reader.fill(piece.of(numbers), piece.name, piece.source, kind)

            write_own_numbers(parameter, kind, fill)
    refresh(engine)
    if not weights_only:
        set_loss_scaler_state(engine.deepspeed.optimizer, manifest.loss_scaler)
