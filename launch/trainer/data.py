"""Opens the prepared data of a run and checks it against the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.dataset import PackedSamples
from data_pipeline.errors import DataError
from data_pipeline.loader import BatchPlan, TokenBatch, global_batch, prefetched_batches
from data_pipeline.meta import read_meta
from megalite.checkpoint.manifest import step_folders
from megalite.config import Config, ResolvedLayout


@dataclass(frozen=True)
class RunData:
    """The samples of a run, with notices about them."""

    training: PackedSamples
    held_out: PackedSamples | None  # None if the run does not evaluate
    tokenizer: str | None  # folder of the tokenizer that prepared them
    tokenizer_sha256: str | None  # of its tokenizer.json
    notices: tuple[str, ...]


def open_data(config: Config) -> RunData:
    """Opens `data.path`. Raises DataError if it is missing, damaged, or has a larger vocabulary than the model."""
    prefixes = [Path(path) for path in config.data.path]
    length, seed = config.training.sequence_length, config.training.seed
    fraction = config.data.held_out_fraction
    limit = config.model.vocab_size
    training = PackedSamples(prefixes, length, seed, "train", fraction, vocab_limit=limit)
    held_out = (
        PackedSamples(prefixes, length, seed, "held_out", fraction, vocab_limit=limit)
        if config.training.evaluation.interval
        else None
    )
    if training.vocab_size is not None and training.vocab_size > config.model.vocab_size:
        raise DataError(
            f"{prefixes[0]} was prepared with a vocabulary of {training.vocab_size}, but model.vocab_size is "
            f"{config.model.vocab_size}: {_remedy(config, training.vocab_size)}"
        )
    meta = read_meta(prefixes[0])
    notices = [samples.notice() for samples in (training, held_out) if samples is not None]
    return RunData(
        training,
        held_out,
        meta.tokenizer if meta else None,
        meta.tokenizer_sha256 if meta else None,
        tuple(notice for notice in notices if notice),
    )


def _remedy(config: Config, vocab_size: int) -> str:
    """Returns what to do about data of a larger vocabulary than the model's."""
    checkpoints = config.run_dir / "checkpoints"
    if step_folders(checkpoints):
        return f"{checkpoints} is of that model, so give the data it was trained on, or choose another run_dir"
    if config.training.initialize_from is not None:
        return f"prepare the data with the tokenizer of {config.training.initialize_from}"
    return f"set model.vocab_size to at least {vocab_size}"


def training_batches(
    data: RunData, config: Config, layout: ResolvedLayout, replica: int, *, consumed: int, steps: int
) -> Iterator[list[TokenBatch]]:
    """Returns this replica's micro-batches of the next `steps` steps, prepared ahead in a thread."""
    plan = _batch_plan(config, layout, replica)
    return prefetched_batches(data.training, plan, start_consumed=consumed, steps=steps)


def evaluation_batches(data: RunData, config: Config, layout: ResolvedLayout, replica: int) -> Sequence[TokenBatch]:
    """Returns this replica's held-out micro-batches; over all replicas the same samples on every layout."""
    if data.held_out is None:
        return []
    plan = replace(_batch_plan(config, layout, replica), global_batch_size=config.training.evaluation.samples)
    return global_batch(data.held_out, plan, consumed_samples=0)


def _batch_plan(config: Config, layout: ResolvedLayout, replica: int) -> BatchPlan:
    return BatchPlan(
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=replica,
        data_parallel_size=layout.data_parallel_size,
        document_mask=config.data.document_mask,
    )
