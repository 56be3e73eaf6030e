"""Data that `megalite evaluate` scores: documents of text in windows, or the sets of prepared data of a run.

In: the options of the command and the stored model. Out: a `Texts`, or a `Prepared` for each set; both yield batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from data_pipeline.document import refuse_bad_row
from data_pipeline.evaluation_windows import Window, document_windows, equally_long_batches
from data_pipeline.loader import BatchPlan, global_batch
from data_pipeline.samples.samples import Samples
from data_pipeline.samples.token_stream import Split
from data_pipeline.sources import Source, open_sources
from data_pipeline.storage.paths import with_ending
from launch.errors import LaunchError
from launch.inference.command_options import EvaluateOptions
from launch.inference.session import Loaded
from launch.inference.stored_model import StoredModel
from launch.runtime.logs import get_logger
from launch.trainer.data.opening import PACKINGS
from launch.trainer.data.packing import packed_splits
from launch.trainer.data.remote_data import find_or_fetch_copies, with_copies
from launch.trainer.loss_targets import notices_of_evaluation
from megalite.checkpoint.errors import CheckpointError
from megalite.config.base import Section
from megalite.config.data import DataConfig
from megalite.config.errors import describe_validation_error
from megalite.config.sections import TrainingConfig

LONGEST_BY_DEFAULT = 2048  # tokens, for a model that no run saved, whose context may be a million tokens
log = get_logger(__name__)
ANY = TypeVar("ANY", bound=Section)
BATCH_TOKENS = 8192  # read at once, unless one row is longer
Tokens = NDArray[np.int64]  # [batch, seq]
Batch = tuple[Tokens, Tokens, Tokens | None]  # tokens, targets, positions where documents share a row


@dataclass
class Score:
    """Running sums."""

    loss: float = 0.0  # nats
    tokens: int = 0  # predicted, each once
    documents: int = 0
    bytes: int = 0  # of the predicted text, UTF-8

    @property
    def mean(self) -> float:
        return self.loss / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean) if self.mean < 700 else math.inf


@dataclass(frozen=True)
class Texts:
    """Documents, each scored separately."""

    sources: list[Source]
    sequence_length: int  # tokens that the model reads at once
    stride: int

    def batches(self, loaded: Loaded, score: Score) -> Iterator[Batch]:
        """Yields the windows of all documents; counts documents and their bytes."""
        for batch in equally_long_batches(self._windows(loaded.stored, score), BATCH_TOKENS):
            yield batch.tokens, batch.targets, None

    def _windows(self, stored: StoredModel, score: Score) -> Iterator[Window]:
        tokenizer = stored.loaded_tokenizer
        read = chain.from_iterable(source.documents(refuse_bad_row) for source in self.sources)
        for text in filter(None, ("".join(document.blocks) for document in read)):
            ids = tokenizer.ids(text)
            stored.check_ids(ids, "the text")
            # the first token is not predicted, so its bytes do not count; a special token has none
            first = tokenizer.decode(ids[:1])
            score.bytes += max(0, len(text.encode()) - len(first.encode()))
            score.documents += 1
            yield from document_windows(np.array(ids, dtype=np.int64), self.sequence_length, self.stride)


@dataclass(frozen=True)
class Prepared:
    """The first samples of a split, as one of the sets that a run is evaluated on or by itself."""

    name: str  # of the set; "" where there is only one
    samples: Samples
    count: int
    document_mask: bool
    notice: str | None

    @property
    def sequence_length(self) -> int:
        return self.samples.sequence_length

    def batches(self, loaded: Loaded, score: Score) -> Iterator[Batch]:
        """Yields the samples in their order."""
        size = max(1, BATCH_TOKENS // self.sequence_length)
        for first in range(0, self.count, size):
            count = min(size, self.count - first)
            plan = BatchPlan(count, count, data_parallel_rank=0, data_parallel_size=1, document_mask=self.document_mask)
            (batch,) = global_batch(self.samples, plan, consumed_samples=first)
            yield batch.tokens, batch.targets, batch.positions


class _Choice(NamedTuple):
    """A set of prepared data to score."""

    name: str
    prefixes: Sequence[str]
    split: Split
    fraction: float  # held out
    samples: int | None  # None: as many as the run's other sets, or else all


def scored_data(options: EvaluateOptions, stored: StoredModel) -> list[Texts] | list[Prepared]:
    """Opens the sets of data to score, with names if they are several.

    Raises LaunchError, DataError or CheckpointError if the model cannot be scored on them.
    """
    training = _section(TrainingConfig, stored, "training")
    own = training.sequence_length if training else LONGEST_BY_DEFAULT
    longest = stored.model.max_position_embeddings
    length = options.sequence_length or min(own, longest)
    if stored.model.position_embedding == "learned" and length > longest:
        raise LaunchError(f"--sequence-length {length}: this model has learned {longest} positions: use at most that")
    if options.text:
        stride = options.stride or length
        if stride > length:
            raise LaunchError(f"--stride {stride} would leave out tokens: use at most the sequence length, {length}")
        return [Texts(open_sources(options.text, options.text_field), length, stride)]
    data = _section(DataConfig, stored, "data")
    choices = _choices(options, data)
    asked = data or DataConfig()
    if options.data:
        asked = asked.model_copy(update={"path": list(options.data), "sources": {}, "validation": {}})
    wanted = {prefix for choice in choices for prefix in choice.prefixes}
    places = find_or_fetch_copies(asked, length, only=wanted, may_fetch=True, tell=log.info)
    choices = [one._replace(prefixes=[places.get(prefix, prefix) for prefix in one.prefixes]) for one in choices]
    data = data and with_copies(data, places)
    prefixes = [Path(prefix) for choice in choices for prefix in choice.prefixes]
    if not prefixes:
        raise LaunchError("nothing to score: give --text FILE, or --data PREFIX of prepared data")
    for prefix in prefixes:
        if not options.data and not with_ending(prefix, ".bin").is_file():
            raise LaunchError(f"the run's data {prefix.absolute()} is not there: give --data PREFIX, or --text FILE")
        stored.check_prepared(prefix)
    return [_prepared(choice, options, stored, training, data, length, is_own=length == own) for choice in choices]


def _choices(options: EvaluateOptions, data: DataConfig | None) -> list[_Choice]:
    """Returns the sets that a run is evaluated on, or what the options ask for in their place."""
    fraction, split = options.held_out_fraction, options.split or "held_out"
    if fraction is None:
        fraction = data.held_out_fraction if data else DataConfig.model_fields["held_out_fraction"].default
    if options.data or data is None:
        return [_Choice("", options.data, split, fraction, None)]
    if data.validation and options.split is None and options.held_out_fraction is None:
        return [
            _Choice(name, one.path or [], "train", 0.0, one.samples)  # all documents
            if one.source is None
            else _Choice(name, data.sources[one.source].path, "held_out", fraction, one.samples)
            for name, one in data.validation.items()
        ]
    texts = {"": data.path} if data.path is not None else {name: one.path for name, one in data.sources.items()}
    return [_Choice(name, path, split, fraction, None) for name, path in texts.items()]


def _prepared(
    choice: _Choice,
    options: EvaluateOptions,
    stored: StoredModel,
    training: TrainingConfig | None,
    data: DataConfig | None,
    length: int,
    *,
    is_own: bool,
) -> Prepared:
    """Opens one set, in samples of `length` tokens, which `is_own` says are as long as the run's."""
    prefixes, split, fraction = [Path(prefix) for prefix in choice.prefixes], choice.split, choice.fraction
    # `megalite data pack` writes plans of a run's own data alone
    is_own &= all((split, fraction) in packed_splits(str(prefix), data) for prefix in prefixes if data)
    packing = data.packing if data and is_own else "concat"
    samples = PACKINGS[packing](
        prefixes,
        length,
        training.seed if training else 0,
        split,
        fraction,
        vocab_limit=stored.model.vocab_size,
        too_long=data.too_long if data and is_own else "cut",
    )
    if options.samples is not None and options.samples > samples.samples_per_epoch:
        raise LaunchError(
            f"--samples {options.samples}: the {samples.split} split of {', '.join(map(str, prefixes))} has "
            f"{samples.samples_per_epoch} of {length} tokens: give at most that, or leave it out"
        )
    usual = training.evaluation.samples if training else samples.samples_per_epoch
    count = options.samples or choice.samples or usual
    notices = list(notices_of_evaluation(samples, count))
    if data and data.packing != packing:
        notices.append(
            f"the run packs {data.packing}, for its own data, sequence length and held-out fraction; these samples are "
            f"packed {packing}, which cuts documents wherever a sample is full"
        )
    return Prepared(choice.name, samples, count, data.document_mask if data else True, "; ".join(notices) or None)


def _section(kind: type[ANY], stored: StoredModel, name: str) -> ANY | None:
    """Returns a section of the config of the run that saved the model, None if there is none."""
    options: Mapping[str, Any] | None = stored.run.get(name)
    if options is None:
        return None
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        raise CheckpointError(f"{stored.folder}: {describe_validation_error(error, kind)}") from None
