"""What `megalite evaluate` scores: documents of text, or samples of prepared data; checked before weights are read.

What is not asked for is the run's own setting where the model is a run's, so that the number is comparable with the
run's evaluation loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from data_pipeline.samples import PackedSamples, Split
from data_pipeline.sources import Source, open_sources
from launch.errors import LaunchError
from launch.inference import Place
from launch.stored_model import StoredModel
from megalite.checkpoint.errors import CheckpointError
from megalite.config import DataConfig, TrainingConfig, describe_validation_error
from megalite.config.base import Section

LONGEST_BY_DEFAULT = 2048  # tokens, for a model that is no run's: it may be meant for a million
ANY = TypeVar("ANY", bound=Section)


@dataclass(frozen=True)
class EvaluateRequest:
    """What `megalite evaluate` is asked for; None and empty: the run's own, or all there is."""

    place: Place
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


@dataclass(frozen=True)
class Texts:
    """Documents, each scored by itself."""

    sources: list[Source]
    sequence_length: int  # tokens that the model reads at once
    stride: int


@dataclass(frozen=True)
class Prepared:
    """Samples 0, 1 ... of a split."""

    samples: PackedSamples
    count: int
    document_mask: bool
    notice: str | None

    @property
    def sequence_length(self) -> int:
        return self.samples.sequence_length


def scored_data(request: EvaluateRequest, stored: StoredModel) -> Texts | Prepared:
    """Raises LaunchError, DataError or CheckpointError where there is nothing that the model can be scored on."""
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
    prefixes = [Path(prefix) for prefix in (request.data or (data.path if data else []))]
    if not prefixes:
        raise LaunchError("nothing to score: give --text FILE, or --data PREFIX of prepared data")
    for prefix in prefixes:
        stored.check_prepared(prefix)
    fraction = request.held_out_fraction
    if fraction is None:
        fraction = data.held_out_fraction if data else DataConfig.model_fields["held_out_fraction"].default
    samples = PackedSamples(
        prefixes,
        length,
        training.seed if training else 0,
        request.split or "held_out",
        fraction,
        vocab_limit=stored.model.vocab_size,
    )
    count = request.samples or (training.evaluation.samples if training else samples.samples_per_epoch)
    return Prepared(samples, count, data.document_mask if data else True, samples.notice())


def _section(kind: type[ANY], stored: StoredModel, name: str) -> ANY | None:
    """A section of the config of the run that saved the model."""
    options: Mapping[str, Any] | None = stored.run.get(name)
    if options is None:
        return None
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        raise CheckpointError(f"{stored.folder}: {describe_validation_error(error, kind)}") from None
