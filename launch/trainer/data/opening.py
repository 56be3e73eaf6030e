"""Opens the prepared data of a run and checks it against the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError, first_names
from data_pipeline.loader import BatchPlan, TokenBatch, count_valid_targets, global_batch, prefetched_batches
from data_pipeline.samples.best_fit import BestFitSamples
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.mix import MixedSamples
from data_pipeline.samples.samples import Samples
from data_pipeline.samples.staged import CutSamples
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.meta import CorpusMeta, read_meta
from launch.trainer.data.packing import plan_cache
from launch.trainer.data.run_mix import DataPosition, check_epochs, mixed, notices_of
from launch.trainer.loss_targets import notices_of_evaluation, notices_of_targets
from megalite.checkpoint.manifest import step_folders
from megalite.config import Config, ResolvedLayout
from megalite.config.batch_stages import sample_length

Text = PackedSamples | BestFitSamples
PACKINGS: dict[str, type[PackedSamples] | type[BestFitSamples]] = {"concat": PackedSamples, "best_fit": BestFitSamples}

SMALL_TEXT = 100_000_000  # tokens; a larger one has documents in every split


@dataclass(frozen=True)
class EvaluationSamples:
    """The samples of one validation set, of which an evaluation reads the first ones."""

    name: str  # "" where there is one set without a name
    samples: Samples
    count: int


@dataclass(frozen=True)
class RunData:
    """The samples of a run, with notices about them."""

    training: Samples
    validation: tuple[EvaluationSamples, ...]  # none if the run does not evaluate
    tokenizer: str | None  # folder of the tokenizer that prepared them
    tokenizer_sha256: str | None
    notices: tuple[str, ...]
    tokenizer_files: bool = False  # all its files were read when they were prepared
    ends_of_turns: tuple[int | None, ...] = ()  # and of documents; None: older versions recorded none for chats

    def from_position(self, config: Config, followed: DataPosition) -> RunData:
        """Returns the data of a run that goes on from a position, from which `config` counts its length.

        Raises DataError if a source would be read more often than it may be.
        """
        if not isinstance(self.training, MixedSamples):
            return self
        training = mixed(config, self.training.sources, followed)
        check_epochs(config, training, followed)
        return replace(self, training=training, notices=(*self.notices, *notices_of(config, training, followed)))

    @property
    def mix_facts(self) -> dict[str, Any]:
        """The mix as checkpoints keep it; empty for a run that reads one text."""
        return self.training.record.facts() if isinstance(self.training, MixedSamples) else {}


def open_data(config: Config) -> RunData:
    """Opens `data.path` or `data.sources`, and what is evaluated on.

    Raises DataError if something is missing, damaged, or has a larger vocabulary than the model.
    """
    texts = open_texts(config, sample_length(config.training))
    training = _training(config, texts)
    validation = tuple(_validation(config, texts)) if config.training.evaluation.interval else ()
    metas = _checked_metas(config)
    if training.vocab_size is not None and training.vocab_size > config.model.vocab_size:
        raise DataError(
            f"{config.data.prefixes[0]} was prepared with a vocabulary of {training.vocab_size}, but model.vocab_size "
            f"is {config.model.vocab_size}: {_remedy(config, training.vocab_size)}"
        )
    meta = metas.get(config.data.prefixes[0])
    trained = [metas[prefix] for prefix in config.data.prefixes if prefix in metas]
    turns = [meta.end_of_turn_id for meta in trained if meta.train_on]
    texts_with_end = [
        meta for meta in trained if meta.append_eos and not meta.train_on and meta.eos_token_id is not None
    ]
    notices = [training.notice()]
    for one in validation:
        said = notices_of_evaluation(one.samples, one.count)
        notices += [f"{one.name}: {notice}" if one.name else notice for notice in said]
    notices += [_nothing_held_out(config, name, text) for name, text in texts.items()]
    notices += notices_of_targets(texts, config.data.too_long)
    return RunData(
        training,
        validation,
        meta.tokenizer if meta else None,
        meta.tokenizer_sha256 if meta else None,
        tuple(notice for notice in notices if notice),
        meta is not None and meta.tokenizer_files,
        tuple(dict.fromkeys([*turns, *(meta.eos_token_id for meta in texts_with_end)])),
    )


def _nothing_held_out(config: Config, name: str, text: Text) -> str | None:
    """Returns a notice if `data.held_out_fraction` asks for documents of a text that is too small to have any."""
    paths = config.data.sources[name].path if name else config.data.path or []
    if not config.data.held_out_fraction or text.token_count > SMALL_TEXT:
        return None
    if text.token_count < sum(IndexedTokens(Path(path)).token_count for path in paths):
        return None
    of_text = f"source {name}" if name else first_names(paths)
    return (
        f"data.held_out_fraction {config.data.held_out_fraction:g} holds out none of the documents of {of_text}, which "
        "are too few: all are trained on"
    )


def open_training(config: Config) -> Samples:
    """Opens the training text alone; of a mix, as a new run follows it."""
    return _training(config, open_texts(config, sample_length(config.training)))


def open_texts(config: Config, length: int) -> dict[str, Text]:
    """Opens the training samples of each source, of `length` tokens; `data.path` is one without a name."""
    data = config.data
    paths = {"": data.path} if data.path is not None else {name: one.path for name, one in data.sources.items()}
    return {name: _open(config, path, data.held_out_fraction, length) for name, path in paths.items()}


def _training(config: Config, texts: Mapping[str, Text]) -> Samples:
    return texts[""] if config.data.path is not None else mixed(config, texts)


def _validation(config: Config, texts: Mapping[str, Text]) -> Iterator[EvaluationSamples]:
    """Yields what the run is evaluated on: `data.validation`, or the held-out documents of each source.

    All evaluations of a run have its first length, so that their losses can be compared.
    """
    usual, length = config.training.evaluation.samples, config.training.sequence_length
    if length != sample_length(config.training):
        texts = open_texts(config, length)
    for name, chosen in config.data.validation.items():
        if chosen.source is not None:
            samples = texts[chosen.source].of_split("held_out")
        else:
            samples = _open(config, chosen.path or [], 0.0, length)  # all documents
        yield EvaluationSamples(name, samples, chosen.samples or usual)
    for name, text in texts.items() if not config.data.validation else ():
        yield EvaluationSamples(name, text.of_split("held_out"), usual)


def _open(config: Config, prefixes: Sequence[str], held_out_fraction: float, length: int) -> Text:
    """Opens the training samples of one text."""
    training, paths = config.training, [Path(prefix) for prefix in prefixes]
    return PACKINGS[config.data.packing](
        paths,
        length,
        training.seed,
        "train",
        held_out_fraction,
        vocab_limit=config.model.vocab_size,
        too_long=config.data.too_long,
        plan_cache=plan_cache(config.data),
    )


def _checked_metas(config: Config) -> dict[str, CorpusMeta]:
    """Returns the metadata of all prefixes that have some. Raises DataError if they name different tokenizers."""
    found = ((prefix, read_meta(Path(prefix))) for prefix in config.data.all_prefixes)
    metas = {prefix: meta for prefix, meta in found if meta is not None}
    for prefix, meta in metas.items():
        known, first = next(iter(metas.items()))
        if meta.tokenizer_sha256 != first.tokenizer_sha256:
            raise DataError(
                f"{known} and {prefix} were made with different tokenizers ({first.tokenizer} and "
                f"{meta.tokenizer}), so the same id means other text in them: prepare them with the same one"
            )
    return metas


def _remedy(config: Config, vocab_size: int) -> str:
    """Returns what to do about data of a larger vocabulary than the model's."""
    checkpoints = config.run_dir / "checkpoints"
    if step_folders(checkpoints):
        return f"{checkpoints} is of that model, so give the data it was trained on, or choose another run_dir"
    if config.training.initialize_from is not None:
        return f"prepare the data with the tokenizer of {config.training.initialize_from}"
    return f"set model.vocab_size to at least {vocab_size}"


def training_batches(
    data: RunData, config: Config, layout: ResolvedLayout, replica: int, followed: DataPosition
) -> Iterator[list[TokenBatch]]:
    """Returns this replica's micro-batches of each step from a position to the end, prepared ahead in a thread.

    `config` counts its length from where the session started: the loop has that end after a rollback too.
    """
    plan, last_step = _batch_plan(config, layout, replica), config.total_steps
    stretches, consumed = followed.counted(config).batches.stretches, followed.consumed_samples
    ends = [*(stretch.step for stretch in stretches[1:]), last_step]
    by_stage = []
    for (begin, _, shape, _), end in zip(stretches, ends, strict=True):
        steps = min(end, last_step) - begin
        if steps <= 0:
            break
        samples = data.training if shape.parts == 1 else CutSamples(data.training, shape.parts)
        of_stage = replace(plan, global_batch_size=shape.global_batch_size, micro_batch_size=shape.micro_batch_size)
        by_stage.append(prefetched_batches(samples, of_stage, start_consumed=consumed * shape.parts, steps=steps))
        consumed += steps * shape.samples
    return chain.from_iterable(by_stage)


def evaluation_batches(
    one: EvaluationSamples, config: Config, layout: ResolvedLayout, replica: int
) -> Sequence[TokenBatch]:
    """Returns this replica's micro-batches of a validation set; over all replicas the same samples on every layout."""
    plan = replace(_batch_plan(config, layout, replica), global_batch_size=one.count)
    return global_batch(one.samples, plan, consumed_samples=0)


def evaluation_targets(one: EvaluationSamples, config: Config, layout: ResolvedLayout) -> int:
    """Returns the targets that count in an evaluation on a validation set, over all replicas."""
    plan = replace(_batch_plan(config, layout, 0), global_batch_size=one.count)
    return count_valid_targets(one.samples, plan, consumed_samples=0)


def _batch_plan(config: Config, layout: ResolvedLayout, replica: int) -> BatchPlan:
    return BatchPlan(
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=replica,
        data_parallel_size=layout.data_parallel_size,
        document_mask=config.data.document_mask,
    )
