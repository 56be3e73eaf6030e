"""Rules about the sources, stages and validation sets of `data`: a sentence with a remedy for each broken rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megalite.config.data import DataConfig, DataStage
from megalite.config.path_or_url import url_of
from megalite.config.rules.stages import problem_with_place, problems_with_order
from megalite.config.store_url import problem_with_url
from megalite.config.suggestions import multiples_near, nearest_name

if TYPE_CHECKING:
    from megalite.config.config import Config


def problems_with_data(config: Config, data_parallel_size: int | None) -> Iterator[str]:
    """Yields a sentence for each broken rule about `data`, of which some are about the batch as well."""
    data = config.data
    if bool(data.path) == bool(data.sources):
        yield (
            "data.path and data.sources both name the text of the run: keep one of them, and drop the other with "
            "data.path=null or data.sources={}"
            if data.path
            else "a run needs data: set data.path to a prefix written by `megalite prepare`, or data.sources"
        )
        return
    if data.packing == "best_fit" and not data.document_mask:
        yield (
            "data.packing best_fit puts whole documents side by side, and without data.document_mask they would see "
            "each other and their padding: use document_mask true, or packing concat"
        )
    yield from _urls(data)
    yield from _weights(data)
    yield from _stages(config)
    yield from _validation(config, data_parallel_size)


def _urls(data: DataConfig) -> Iterator[str]:
    for url in data.urls:
        protocol, _, rest = url.partition("://")
        if problem := problem_with_url(url):
            yield f"a prefix of data on {protocol}:// {problem}"
        elif "*" in rest:
            yield f"data at {url} is a pattern, and patterns match files of this machine alone: list the prefixes"
        elif not rest.rpartition("/")[0] or rest.endswith("/"):
            yield f"data at {url} is a folder or a bucket: add the prefix of its files, as in s3://bucket/folder/web"
    if data.cache is not None and (place := url_of(data.cache)):
        yield f"data.cache {place} is a URL, where copies of data cannot be read at places: give a local folder"


def _weights(data: DataConfig) -> Iterator[str]:
    by_epochs = [name for name, source in data.sources.items() if source.epochs is not None]
    by_weight = [name for name, source in data.sources.items() if source.weight is not None]
    for name, source in data.sources.items():
        if source.weight is None and source.epochs is None:
            yield (
                f"data.sources.{name}.weight is missing, and so are epochs: give a weight, or 0 until a stage reads it"
            )
        if source.epochs is not None and source.max_epochs is not None:
            yield (
                f"data.sources.{name} has epochs {source.epochs:g} and max_epochs {source.max_epochs:g}, but epochs "
                "already say how often it is read: remove max_epochs"
            )
    if by_epochs and by_weight:
        yield (
            f"data.sources.{by_epochs[0]} has epochs and data.sources.{by_weight[0]} has a weight: give all sources "
            "epochs, or all of them weights"
        )


def _stages(config: Config) -> Iterator[str]:
    data = config.data
    if data.stages and not data.sources:
        yield "data.stages change the weights of data.sources, and there are none: name sources, or remove the stages"
        return
    if data.stages and data.is_by_epochs:
        yield "data.stages have weights, but data.sources say epochs: give the sources weights, or remove the stages"
        return
    for number, stage in enumerate(data.stages):
        if problem := problem_with_place("data.stages", number, stage):
            yield problem
            return
        yield from _names(stage, number, data)
    places = [_first_token(config, stage) for stage in data.stages]
    yield from problems_with_order("data.stages", data.stages, places)
    if data.is_by_epochs or any(source.weight is None for source in data.sources.values()):
        return
    own = {name: source.weight or 0.0 for name, source in data.sources.items()}
    if data.sources and not any(own.values()) and places[:1] != [0]:
        yield (
            "data.sources all have weight 0, so no source can be read: give one a weight above 0, or begin data.stages "
            "with a stage from_tokens 0"
        )
    for number, stage in enumerate(data.stages):
        if not any(data.weights_of(stage).values()):
            yield f"all sources have weight 0 in stage {number} of data.stages: give one a weight above 0"


def _first_token(config: Config, stage: DataStage) -> int:
    if stage.from_tokens is not None:
        return stage.from_tokens
    assert stage.from_steps is not None
    return config.batches.tokens_after(stage.from_steps)


def _names(stage: DataStage, number: int, data: DataConfig) -> Iterator[str]:
    for name in stage.weights:
        if name not in data.sources:
            yield f"stage {number} of data.stages gives a weight to {_unknown(name, data)}"


def _unknown(name: str, data: DataConfig) -> str:
    meant = nearest_name(name, data.sources)
    remedy = f"did you mean {meant}?" if meant else f"there are {', '.join(data.sources)}"
    return f'"{name}", which data.sources does not have: {remedy}'


def _validation(config: Config, data_parallel_size: int | None) -> Iterator[str]:
    data, training = config.data, config.training
    divisor = training.micro_batch_size * (data_parallel_size or 1)
    for name, chosen in data.validation.items():
        if (chosen.source is None) == (chosen.path is None):
            yield (
                f"data.validation.{name} needs one of source and path: a source whose held-out documents are evaluated "
                "on, or prefixes of other text"
            )
        elif chosen.source is not None and not data.sources:
            yield (
                f"data.validation.{name}.source {chosen.source} is no source, as the run has data.path: without "
                "data.validation its held-out documents are evaluated on"
            )
        elif chosen.source is not None and chosen.source not in data.sources:
            yield f"data.validation.{name}.source is {_unknown(chosen.source, data)}"
        if chosen.samples is not None and chosen.samples % divisor:
            yield (
                f"data.validation.{name}.samples {chosen.samples} is not a multiple of training.micro_batch_size "
                f"x data-parallel size = {divisor}: use {multiples_near(chosen.samples, divisor)} samples"
            )
    if training.evaluation.interval and not data.held_out_fraction:
        if not data.validation:
            yield (
                f"training.evaluation.interval {training.evaluation.interval} has nothing to evaluate on, "
                "because data.held_out_fraction is 0: use a held_out_fraction of 0.01, or interval 0"
            )
        for name, chosen in data.validation.items():
            if chosen.source is not None:
                yield (
                    f"data.validation.{name}.source {chosen.source} has no held-out documents, because "
                    "data.held_out_fraction is 0: use a held_out_fraction of 0.01"
                )
