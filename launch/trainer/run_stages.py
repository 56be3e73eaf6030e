"""Checks that the stages of training of a resumed run leave its past as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config
from megalite.config.batch_stages import BatchSchedule, BatchShape, sample_length
from megalite.config.sections import TrainingConfig
from megalite.config.training_stage import TrainingStage


def check_past_batches(manifest: Manifest, config: Config, folder: Path, advice: str) -> None:
    """Raises CheckpointError, with the first step that differs, if the steps so far had other batches than `config`
    gives them, or samples of another length.

    Without stages, before and now, a batch size is that of the steps to come, as it has always been.
    """
    now, then = config.training, _training_of(manifest, config.training)
    if not (now.stages or then.stages):
        return
    if sample_length(then) != sample_length(now):
        raise CheckpointError(
            f"{folder} has read samples of {sample_length(then):,} tokens, the longest sequence of its config, and the "
            f"longest of this config has {sample_length(now):,}: the order of the data is one of samples of that "
            f"length, so the stages of a run that has begun may have lengths that divide it, of which one is the "
            f"whole: keep it, or {advice}"
        )
    ours, theirs = BatchSchedule(now), BatchSchedule(then)
    begins = {stretch.step for schedule in (ours, theirs) for stretch in schedule.stretches}
    for step in sorted(begin for begin in begins if begin < manifest.step):
        was, becomes = theirs.shape_after(step), ours.shape_after(step)
        if _sizes(was) != _sizes(becomes):
            raise CheckpointError(
                f"{folder} has done step {step + 1:,} (token {theirs.tokens_after(step):,}) with {_in_words(was)}, and "
                f"this config has {_in_words(becomes)} there; only what comes from step {manifest.step + 1:,} (token "
                f"{theirs.tokens_after(manifest.step):,}) on may change, by a stage in training.stages that begins "
                f"there or later: set the rest back, or {advice}"
            )


def _training_of(manifest: Manifest, now: TrainingConfig) -> TrainingConfig:
    """Returns `now` with the batch that the config of a checkpoint had, where it names one."""
    saved: dict[str, Any] = manifest.config.get("training") or {}
    known = {name: saved[name] for name in ("global_batch_size", "sequence_length") if name in saved}
    stages = tuple(TrainingStage.model_validate(stage) for stage in saved.get("stages", ()))
    return now.model_copy(update=known | {"stages": stages})


def _sizes(shape: BatchShape) -> tuple[int, int]:
    return shape.global_batch_size, shape.sequence_length


def _in_words(shape: BatchShape) -> str:
    return f"{shape.global_batch_size:,} sequences of {shape.sequence_length:,} tokens"
