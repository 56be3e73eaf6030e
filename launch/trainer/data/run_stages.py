"""Checks that the stages of training of a resumed run leave its past as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config
from megalite.config.batch_stages import BatchSchedule, BatchShape, sample_length, shapes_of
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
    tokens_seen = int(manifest.state.get("tokens_seen", 0))
    if tokens_seen != theirs.tokens_after(manifest.step):
        _check_begun(now, then, manifest.step, tokens_seen, folder, advice)
        return
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


def _check_begun(
    now: TrainingConfig, then: TrainingConfig, step: int, tokens_seen: int, folder: Path, advice: str
) -> None:
    """Raises CheckpointError unless both configs have the same stages behind a position.

    A run without stages may have gone on with other batches, of which only the number of tokens is known. A walk from
    the start would then find stages at other steps than those at which they begin.
    """
    was, becomes = (_begun(training, step, tokens_seen) for training in (then, now))
    if was != becomes:
        raise CheckpointError(
            f"{folder} has done {step:,} steps ({tokens_seen:,} tokens) with {', then '.join(was)}, and this config "
            f"has {', then '.join(becomes)} there; only what comes from step {step + 1:,} (token {tokens_seen:,}) on "
            f"may change, by a stage in training.stages that begins there or later: set the rest back, or {advice}"
        )


def _begun(training: TrainingConfig, step: int, tokens_seen: int) -> list[str]:
    """Returns in words the batch at the start and those of the stages whose place lies before a position."""
    first, *others = shapes_of(training)
    found = [_in_words(first)]
    for stage, shape in zip(training.stages, others, strict=True):
        place, position = (stage.from_tokens, tokens_seen) if stage.from_steps is None else (stage.from_steps, step)
        if (place or 0) >= position:
            break
        found.append(f"{_in_words(shape)} ({stage.place})")
    return found


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
