"""A training engine's state to and from a checkpoint, on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import WEIGHT, FileEntry, Manifest, step_folder
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.writer import PieceWriter, commit, start, temporary_folder
from megalite.engine.engine import Engine
from megalite.engine.seams import loss_scaler_state, set_loss_scaler_state, tied_weights
from megalite.engine.state import (
    create_moments,
    moment_names,
    optimizer_step_count,
    read_parameter,
    refresh,
    write_parameter,
)


def save_engine(
    engine: Engine,
    root: Path,
    *,
    step: int,
    config: dict[str, Any],
    state: dict[str, Any],
    tokenizer: str | None = None,
    tokenizer_sha256: str | None = None,
) -> Path:
    """Writes `root/step_XXXXXXXX` from all ranks; returns it. Every rank raises CheckpointError if one fails.

    Data-parallel rank 0 of each stage and tensor-parallel rank writes what it holds, one parameter gathered at a time;
    what all tensor-parallel ranks hold alike is written by the first.
    """
    folder = root / step_folder(step)
    _together(lambda: start(folder) if dist.get_rank() == 0 else None)
    moments = moment_names(engine)
    files, shapes = _together(lambda: _write_pieces(engine, temporary_folder(folder), moments))
    manifest = Manifest(
        step=step,
        config=config,
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer_sha256,
        state=state,
        moments=moments,
        optimizer_steps=optimizer_step_count(engine),
        loss_scaler=loss_scaler_state(engine.deepspeed.optimizer),
        tensors=shapes,
        files=files,
    )
    _together(lambda: commit(folder, manifest) if dist.get_rank() == 0 else None)
    return folder


def load_engine(engine: Engine, reader: CheckpointReader, *, weights_only: bool) -> None:
    """Fills this rank's weights, and optimizer state unless `weights_only`, with its slices of the checkpoint."""
    manifest = reader.manifest
    moments = () if weights_only else manifest.moments
    if moments:
        create_moments(engine, manifest.optimizer_steps)
    for _, parameter in engine.parameters():
        shard = parameter.shard  # type: ignore[attr-defined]
        tensors = {}
        for kind in (WEIGHT, *moments):
            value = torch.zeros(shard.local_shape)
            for piece in shard.pieces():
                stored = manifest.tensors.get(piece.name, piece.shape)
                if stored != piece.shape:
                    raise CheckpointError(
                        f"{reader.folder}: {piece.name} has shape {list(stored)}, but the model of this config needs "
                        f"{list(piece.shape)}"
                    )
                value[piece.target] = reader.read(piece.name, piece.source, kind)
            tensors[kind] = value.to(engine.deepspeed.device)
        write_parameter(parameter, tensors)
    refresh(engine)
    if not weights_only:
        set_loss_scaler_state(engine.deepspeed.optimizer, manifest.loss_scaler)


def _write_pieces(
    engine: Engine, folder: Path, moments: tuple[str, ...]
) -> tuple[dict[str, FileEntry], dict[str, tuple[int, ...]]]:
    at = engine.coordinate
    writer = PieceWriter(folder, f"stage_{at.pipeline_rank:03d}_tensor_{at.tensor_rank:03d}")
    failure: Exception | None = None
    # the first stage's copy of a tied weight is the one that the others follow; masters and moments differ by rounding
    tied = tied_weights(engine.deepspeed.module)
    copies = {weight for weight, group in tied if dist.get_group_rank(group, dist.get_rank()) > 0}
    for _, parameter in engine.parameters():
        shard = parameter.shard  # type: ignore[attr-defined]
        # collective over the data-parallel group: a rank that cannot write goes on taking part
        tensors = read_parameter(parameter, moments)
        if failure or at.data_rank or (shard.is_replicated and at.tensor_rank) or parameter in copies:
            continue
        try:
            for kind, value in tensors.items():
                for piece in shard.pieces():
                    writer.add(kind, piece.name, piece.shape, piece.source, value[piece.target])
        except (CheckpointError, OSError) as error:
            failure = error
    if failure:
        raise failure
    writer.flush()
    return writer.files, writer.shapes


def _together(action: Any) -> Any:
    """Runs `action` on every rank and merges the dicts it returns; a failure on one rank is raised on all.

    A rank that fails alone would leave the others waiting in the next collective.
    """
    failure: str | None = None
    result = None
    try:
        result = action()
    except Exception as error:  # whatever it is, the others must hear of it
        failure = str(error) or repr(error)
    everyone: list[tuple[Any, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(everyone, (result, failure))
    failures = [(rank, why) for rank, (_, why) in enumerate(everyone) if why]
    if failures:
        raise CheckpointError(f"saving a checkpoint failed on rank {failures[0][0]}: {failures[0][1]}")
    if not isinstance(result, tuple):
        return None
    return tuple({k: v for rank_result, _ in everyone for k, v in rank_result[i].items()} for i in range(len(result)))
