"""`megalite evaluate`: scores text or prepared samples with a stored model: loss, perplexity, bits per byte.

In: documents of text, each scored separately in windows, or samples of prepared data, the same as in the evaluation of
a run. Out: an `Evaluation`. All ranks compute the same sums; logits exist only for one chunk of tokens at a time.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from data_pipeline.dataset import Samples
from data_pipeline.files import with_ending
from data_pipeline.loader import (
    IGNORED_TARGET,
    BatchPlan,
    Window,
    document_windows,
    equally_long_batches,
    global_batch,
)
from data_pipeline.sources import Source, open_sources
from data_pipeline.sources.document import refuse_bad_row
from data_pipeline.stream import Split
from launch.errors import LaunchError
from launch.inference.session import Loaded, ModelPlacement, rank_main
from launch.inference.session import run as run_anywhere
from launch.inference.stored_model import StoredModel
from launch.output import spinner
from launch.runtime.logs import get_logger
from launch.runtime.printing import print_result, say
from launch.runtime.rank_process import run_to_the_end
from launch.trainer.data import PACKINGS
from launch.trainer.packing import packed_splits
from launch.trainer.remote_data import copies_here, with_copies
from megalite.checkpoint.errors import CheckpointError
from megalite.config.base import Section
from megalite.config.data import DataConfig
from megalite.config.errors import describe_validation_error
from megalite.config.sections import TrainingConfig
from megalite.parallel.loss import head_loss
from megalite.planner.units import plural

LONGEST_BY_DEFAULT = 2048  # tokens, for a model that no run saved, whose context may be a million tokens
log = get_logger(__name__)
ANY = TypeVar("ANY", bound=Section)


@dataclass(frozen=True)
class EvaluateRequest:
    """The options of `megalite evaluate`; None and empty: those of the run, or everything."""

    place: ModelPlacement
    text: list[str]  # sources, as `megalite prepare` takes them
    data: list[str]  # prefixes of prepared data
    text_field: str = "text"
    split: Split | None = None
    held_out_fraction: float | None = None
    samples: int | None = None
    sequence_length: int | None = None
    stride: int | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.text and self.data:
            raise LaunchError("--text and --data are two things to score: give one of them")
        of_data = {"--split": self.split, "--held-out-fraction": self.held_out_fraction, "--samples": self.samples}
        for option, value in of_data.items() if self.text else [("--stride", self.stride)]:
            if value is not None:
                raise LaunchError(f"{option} belongs to {'--data' if self.text else '--text'}: leave it out")


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
        tokenizer = stored.load_tokenizer()
        for text in documents(self.sources):
            ids = tokenizer(text, verbose=False)["input_ids"]
            stored.check_ids(ids, "the text")
            # the first token is not predicted, so its bytes do not count; a special token has none
            first = tokenizer.decode(ids[:1], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            score.bytes += max(0, len(text.encode()) - len(first.encode()))
            score.documents += 1
            yield from document_windows(np.array(ids, dtype=np.int64), self.sequence_length, self.stride)


@dataclass(frozen=True)
class Prepared:
    """The first samples of a split."""

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


def scored_data(request: EvaluateRequest, stored: StoredModel) -> Texts | Prepared:
    """Opens the data to score. Raises LaunchError, DataError or CheckpointError if the model cannot be scored on it."""
    training = _section(TrainingConfig, stored, "training")
    own = training.sequence_length if training else LONGEST_BY_DEFAULT
    longest = stored.model.max_position_embeddings
    length = request.sequence_length or min(own, longest)
    if stored.model.position_embedding == "learned" and length > longest:
        raise LaunchError(f"--sequence-length {length}: this model has learned {longest} positions: use at most that")
    if request.text:
        stride = request.stride or length
        if stride > length:
            raise LaunchError(f"--stride {stride} would leave out tokens: use at most the sequence length, {length}")
        return Texts(open_sources(request.text, request.text_field), length, stride)
    data = _section(DataConfig, stored, "data")
    asked = (data or DataConfig()).model_copy(update={"validation": {}})
    if request.data:
        asked = asked.model_copy(update={"path": list(request.data), "sources": {}})
    places = copies_here(asked, length, may_fetch=True, tell=log.info)
    data = data and with_copies(data, places)
    prefixes = [Path(prefix) for prefix in with_copies(asked, places).prefixes]
    if not prefixes:
        raise LaunchError("nothing to score: give --text FILE, or --data PREFIX of prepared data")
    for prefix in prefixes:
        if not request.data and not with_ending(prefix, ".bin").is_file():
            raise LaunchError(f"the run's data {prefix.absolute()} is not there: give --data PREFIX, or --text FILE")
        stored.check_prepared(prefix)
    fraction = request.held_out_fraction
    if fraction is None:
        fraction = data.held_out_fraction if data else DataConfig.model_fields["held_out_fraction"].default
    split: Split = request.split or "held_out"
    # `megalite data pack` writes plans of a run's own data alone
    is_own = length == own and all((split, fraction) in packed_splits(str(prefix), data) for prefix in prefixes if data)
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
    if request.samples is not None and request.samples > samples.samples_per_epoch:
        raise LaunchError(
            f"--samples {request.samples}: the {samples.split} split of {', '.join(map(str, prefixes))} has "
            f"{samples.samples_per_epoch} of {length} tokens: give at most that, or leave it out"
        )
    count = request.samples or (training.evaluation.samples if training else samples.samples_per_epoch)
    notices = [samples.notice()]
    if data and data.packing != packing:
        notices.append(
            f"the run packs {data.packing}, for its own data, sequence length and held-out fraction; these samples are "
            f"packed {packing}, which cuts documents wherever a sample is full"
        )
    notice = "; ".join(filter(None, notices)) or None
    return Prepared(samples, count, data.document_mask if data else True, notice)


def _section(kind: type[ANY], stored: StoredModel, name: str) -> ANY | None:
    """Returns a section of the config of the run that saved the model, None if there is none."""
    options: Mapping[str, Any] | None = stored.run.get(name)
    if options is None:
        return None
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        raise CheckpointError(f"{stored.folder}: {describe_validation_error(error, kind)}") from None


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    model: str
    loss: float  # mean over the tokens, nats
    perplexity: float
    bits_per_byte: float | None  # None for prepared data, whose text is unknown
    tokens: int  # predicted
    sequence_length: int  # maximum of tokens read at once
    seconds: float
    tokens_per_second: float
    documents: int | None = None  # of text
    stride: int | None = None  # of windows over text
    samples: int | None = None  # of prepared data
    samples_per_epoch: int | None = None  # available in the split
    notice: str | None = None  # about the samples


@torch.no_grad()
def evaluate(request: EvaluateRequest, loaded: Loaded, progress: Callable[[Score], None]) -> Evaluation:
    """Scores the data; all ranks run this together. Raises LaunchError or DataError if there is nothing to score."""
    data, score, started = scored_data(request, loaded.stored), Score(), time.perf_counter()
    model = loaded.stored.model
    for tokens, targets, positions in data.batches(loaded, score):
        inputs = (None if part is None else torch.from_numpy(part).to(loaded.device) for part in (tokens, positions))
        hidden, head = loaded.module(*inputs)
        expected = torch.from_numpy(targets).to(loaded.device)
        score.loss += float(
            head_loss(hidden, head, expected, model.vocab_size, loaded.tp, model.final_logit_softcapping)
        )
        score.tokens += int((targets != IGNORED_TARGET).sum())
        progress(score)
    if score.tokens == 0:
        raise LaunchError("nothing to score: no document has two tokens, and the first one has nothing to be told from")
    seconds = time.perf_counter() - started
    extent: dict[str, Any]
    if isinstance(data, Texts):
        extent = {"documents": score.documents, "stride": data.stride}
    else:
        samples_per_epoch = data.samples.samples_per_epoch
        extent = {"samples": data.count, "samples_per_epoch": samples_per_epoch, "notice": data.notice}
    return Evaluation(
        model=str(loaded.stored.folder),
        loss=score.mean,
        perplexity=math.exp(score.mean) if score.mean < 700 else math.inf,
        bits_per_byte=score.loss / math.log(2) / score.bytes if score.bytes else None,
        tokens=score.tokens,
        sequence_length=data.sequence_length,
        seconds=seconds,
        tokens_per_second=score.tokens / seconds,
        **extent,
    )


def documents(sources: list[Source]) -> Iterator[str]:
    """Yields whole documents, those without text left out."""
    for source in sources:
        for document in source.documents(refuse_bad_row):
            if text := "".join(document.blocks):
                yield text


def run(request: EvaluateRequest) -> int:
    """Runs `megalite evaluate`. Returns the exit code."""
    return run_anywhere("launch.inference.evaluate", request, scored_data, show)


def show(request: EvaluateRequest, loaded: Loaded) -> None:
    """Shows progress on a terminal and prints the result to stdout."""
    with spinner("reading", is_shown=loaded.is_rank_zero) as describe:
        evaluation = evaluate(
            request, loaded, lambda score: describe(f"{score.tokens:,} tokens, loss {score.mean:.4f}")
        )
    if loaded.is_rank_zero:
        if evaluation.notice is not None:
            say(f"megalite: {evaluation.notice}", file=sys.stderr)
        print_result(json.dumps(asdict(evaluation), indent=2) if request.as_json else _sentence(evaluation))


def _sentence(evaluation: Evaluation) -> str:
    bits = "" if evaluation.bits_per_byte is None else f", {evaluation.bits_per_byte:.4f} bits per byte"
    if evaluation.documents is not None:
        documents = plural(evaluation.documents, "document")
        of = f"{documents} in windows of {evaluation.sequence_length:,}, {evaluation.stride:,} apart"
    else:
        of = f"{evaluation.samples:,} of {evaluation.samples_per_epoch:,} samples of {evaluation.sequence_length:,}"
    return (
        f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.3f}{bits}: {evaluation.tokens:,} tokens of "
        f"{of}, {evaluation.tokens_per_second:,.0f} tokens/s"
    )


if __name__ == "__main__":
    run_to_the_end(lambda: rank_main(sys.argv[1:], EvaluateRequest, show))
