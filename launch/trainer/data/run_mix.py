"""Resolves the mix of a run: the sample at which each stage begins, how often a source is read, what was read before.

A stage begins at the first step whose first sample lies at its place or behind it. That sample is kept in checkpoints,
so that a resume with another batch size changes nothing that has been read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import floor, log10
from pathlib import Path
from typing import Any, Self

from data_pipeline.errors import DataError
from data_pipeline.samples.mix import MODULUS, Mix, MixedSamples, MixRecord, MixStage, content_id
from data_pipeline.samples.samples import Samples
from megalite.checkpoint.errors import CheckpointError
from megalite.config import Config
from megalite.config.batch_stages import BatchSchedule, sample_length
from megalite.config.data import DataStage
from megalite.units import count, plural


@dataclass(frozen=True)
class DataPosition:
    """The position of a run, and the mix that it has followed up to there; by default that of a new run."""

    step: int = 0
    tokens_seen: int = 0
    consumed_samples: int = 0
    record: MixRecord | None = None
    left_out: tuple[tuple[int, int], ...] = ()  # [first, stop) ranges of samples whose steps rollbacks have undone

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Returns what the state of a checkpoint says; a run with `data.path` has kept a fingerprint alone."""
        facts = state.get("data_mix")
        content = "+".join(filter(None, (state.get("data_fingerprint"), state.get("data_content"))))
        record = MixRecord.read(facts) if facts else MixRecord.of_one(content)
        left_out = tuple((int(first), int(stop)) for first, stop in state.get("excluded_samples", ()))
        step, tokens, consumed = (int(state.get(name, 0)) for name in ("step", "tokens_seen", "consumed_samples"))
        return cls(step, tokens, consumed, record, left_out)

    @property
    def left_out_samples(self) -> int:
        """Number of samples that rollbacks have left out."""
        return sum(stop - first for first, stop in self.left_out)

    def counted(self, config: Config) -> Config:
        """Returns `config` with a length and batches that count from this position."""
        return config.counted_from(self.step, self.tokens_seen)

    def samples_at_end(self, config: Config) -> int:
        """Returns the samples that the run has consumed at its end; `config` counts its length from this position."""
        return self.samples_after(config, max(self.step, config.total_steps))

    def samples_after(self, config: Config, step: int) -> int:
        """Returns the samples that are consumed when `step` steps are done, of which steps of the past may be some.

        Of the past it is told as if all steps had been of the config.
        """
        batches = config.batches if step >= self.step else BatchSchedule(config.training)
        return self.consumed_samples - batches.samples_between(step, self.step)

    def steps_until(self, config: Config, sample: int) -> int:
        """Returns the fewest steps with which all samples before `sample` are consumed; as `samples_after`."""
        step = self.steps_at(config, sample)
        return step if self.samples_after(config, step) >= sample else step + 1

    def steps_at(self, config: Config, sample: int) -> int:
        """Returns how many steps are done before the one that reads `sample`; as `samples_after`."""
        batches = config.batches if sample >= self.consumed_samples else BatchSchedule(config.training)
        before = batches.tokens_after(self.step) - self.consumed_samples * batches.sample_length
        return batches.steps_at(sample * batches.sample_length + before)


NEW_RUN = DataPosition()


def mixed(config: Config, sources: Mapping[str, Samples], followed: DataPosition = NEW_RUN) -> MixedSamples:
    """Returns the samples of `data.sources`, mixed as the config says from the position of the run on."""
    data = config.data
    if data.is_by_epochs:
        wanted = {name: source.epochs or 0.0 for name, source in data.sources.items()}
        mix = Mix.by_samples(
            {name: max(1, round(epochs * sources[name].samples_per_epoch)) for name, epochs in wanted.items()}
        )
    else:
        mix = Mix.by_weights([*sources], _stages(config, followed))
    return MixedSamples(sources, mix, config.training.global_batch_size, _stages_of_batch(config))


def _stages(config: Config, followed: DataPosition) -> list[MixStage]:
    stages = [MixStage(0, _above_zero(config.data.weights_of(DataStage())))]
    config = followed.counted(config)
    record, batch, of_batch = followed.record, config.training.global_batch_size, _stages_of_batch(config)
    known_stages = record.mix.stages if record is not None else ()
    known = {place: stage.first_sample for stage in known_stages for place in (stage.place, *stage.replaced)}
    for stage in config.data.stages:
        place = stage.place
        first = known.get(place)
        is_past = first is not None and first <= followed.consumed_samples
        is_same = record is not None and (record.global_batch_size, record.batch_stages) == (batch, of_batch)
        if first is None or not (is_past or is_same):
            step = stage.from_steps  # the first step at its place or behind it
            if step is None:
                step = followed.steps_until(config, -(-(stage.from_tokens or 0) // sample_length(config.training)))
            first = max(0, followed.samples_after(config, step))
        replaced: tuple[str, ...] = ()
        while stages and stages[-1].first_sample >= first:  # of two places in one step the later one counts
            earlier = stages.pop()
            replaced = (*earlier.replaced, *filter(None, [earlier.place]), *replaced)
        stages.append(MixStage(first, _above_zero(config.data.weights_of(stage)), place, replaced))
    return stages


def _stages_of_batch(config: Config) -> str:
    """Returns `training.stages` as text, by which a resumed run knows whether its batches are still the same.

    Micro-batches are none of its business: like a layout, they may change on a resume and move nothing.
    """
    changing = [stage for stage in config.training.stages if stage.global_batch_size or stage.sequence_length]
    stages = [stage.model_dump(exclude_none=True, exclude={"micro_batch_size"}) for stage in changing]
    return json.dumps(stages) if stages else ""


def _above_zero(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if weight}


# What a run has read.


def check_past(training: Samples, followed: DataPosition, checkpoint: Path, advice: str) -> None:
    """Raises CheckpointError, with the first sample that differs, if the run has read something else so far."""
    ours = training.record if isinstance(training, MixedSamples) else MixRecord.of_one(content_id(training))
    theirs = followed.record
    if theirs is None or (k := theirs.first_difference(ours, followed.consumed_samples)) is None:
        return
    was, now = (record.mix.names[record.mix.source_of(k)] or "data.path" for record in (theirs, ours))
    length, consumed = training.sequence_length, followed.consumed_samples
    what = f"this config reads {now} there"
    if was == now:
        what = f"{now} holds something else now (other text, or another sequence_length, held_out_fraction or packing)"
    if theirs.mix.modulus != MODULUS != ours.mix.modulus and theirs.contents == ours.contents:
        raise CheckpointError(
            f"{checkpoint} has read {consumed:,} samples of these sources with other epochs, and epochs of several "
            f"sources are final once a run has begun, because they order all its samples: set them back, or {advice}"
        )
    raise CheckpointError(
        f"{checkpoint} has read {consumed:,} samples of another mix: sample {k:,} (token {k * length:,}) came from "
        f"{was}, and {what}; only what comes from token {consumed * length:,} on may change, by a stage in data.stages "
        f"that begins there or later: set the rest back, or {advice}"
    )


# What a run is going to read.


def epochs_in_steps(config: Config, training: Samples) -> tuple[str, int]:
    """Returns how many samples and steps the epochs of all sources come to, in words and as a number of steps."""
    assert isinstance(training, MixedSamples) and config.data.is_by_epochs
    steps = NEW_RUN.steps_until(config, training.mix.modulus)
    epochs = ", ".join(f"{source.epochs:g} epochs of {name}" for name, source in config.data.sources.items())
    return f"{epochs} are {_samples_in_steps(config, training, steps)}", steps


def _samples_in_steps(config: Config, training: MixedSamples, steps: int) -> str:
    return f"{training.mix.modulus:,} samples, which are {plural(steps, 'step')}{_of_each_step(config)}"


def check_epochs(config: Config, training: MixedSamples, followed: DataPosition) -> None:
    """Raises DataError if a source is read more often than its `max_epochs`, or the run is longer than its epochs.

    `config` counts its length from the position of the run. Samples that rollbacks have left out do not count: a run
    that was allowed to start is allowed to go on.
    """
    data, left_out = config.data, followed.left_out_samples
    stop = followed.samples_at_end(config) - left_out
    if data.is_by_epochs:
        steps = max(followed.step, followed.steps_until(config, training.mix.modulus + left_out))
        if config.total_steps > steps:
            is_final = followed.consumed_samples and len(training.sources) > 1
            why_not = "; epochs of several sources are final once a run has begun, because they order all its samples"
            raise DataError(
                f"the run takes {config.total_steps:,} steps, and the epochs of data.sources come to "
                f"{_samples_in_steps(config, training, steps)}: set training.steps to {steps}"
                f"{why_not if is_final else ', or raise epochs'}"
            )
        return
    for number, (name, taken) in enumerate(zip(training.mix.names, training.mix.counts(stop), strict=True)):
        size, most = training.sources[name].samples_per_epoch, data.sources[name].max_epochs
        if most is not None and taken > most * size:
            reached = training.mix.sample_of(number, floor(most * size)) or 0
            length = training.sequence_length
            aside = ", samples that rollbacks have left out aside" if left_out else ""
            raise DataError(
                f"{name} is read {taken / size:,.3g} times by token {count(stop * length)}, the end of the run{aside}, "
                f"and data.sources.{name}.max_epochs is {most:g}, which it reaches at token {count(reached * length)}: "
                f"{_remedy(training, number, floor(most * size), stop, followed.consumed_samples)}"
            )


def _of_each_step(config: Config) -> str:
    """Returns the size of a step in words; empty where it changes in the course of the run."""
    return "" if config.training.stages else f" of {config.training.global_batch_size:,}"


def _remedy(training: MixedSamples, number: int, most: int, stop: int, consumed: int) -> str:
    """Returns what keeps a source at `most` samples: a lower weight in the last stage in which it is read.

    Of a stage that has begun, what is still to come becomes a stage of its own.
    """
    mix, name = training.mix, training.mix.names[number]
    stage = [one for one in mix.stages if one.first_sample < stop and one.weights.get(name)][-1]
    earlier = [one for one in mix.stages if one.first_sample <= stage.first_sample]
    later = mix.stages[len(earlier) :]
    first, end = max(stage.first_sample, consumed), min([stop, *(one.first_sample for one in later)])
    share = (most - mix.counts(first)[number]) / (end - first) if first < end else 0.0
    others = sum(weight for other, weight in stage.weights.items() if other != name)
    if share <= 0 or not others:
        return "give it less weight before, a shorter run, or a higher max_epochs"
    kept = earlier if stage.first_sample < consumed else earlier[:-1]

    def is_enough(weight: float) -> bool:
        changed = replace(stage, first_sample=first, weights={**stage.weights, name: weight})
        return replace(mix, stages=(*kept, changed, *later)).counts(stop)[number] <= most

    weight = share * others / (1 - share)
    digits = 2 - floor(log10(weight))
    # three digits, rounded down; lower ones, because the counts of a mix are a few samples off their shares
    lower = (float(f"{units * 10.0**-digits:.3g}") for units in range(floor(weight * 10.0**digits), -1, -1))
    weight = next(filter(is_enough, lower))
    if kept is earlier:
        weights = ", ".join(f"{one}: {stage.weights.get(one, 0) if one != name else weight:g}" for one in mix.names)
        place = f"from_tokens: {first * training.sequence_length}"
        return f"add the stage {{{place}, weights: {{{weights}}}}} to data.stages, or raise max_epochs"
    return f"lower its weight to {weight:g} in the stage {stage.place or 'at the start'}, or raise max_epochs"


def notices_of(config: Config, training: MixedSamples, followed: DataPosition) -> Iterator[str]:
    """Yields notices about a mix: where stages begin, what is read twice, and what is small."""
    batch, length = config.batches.shape_after(followed.step).samples, training.sequence_length
    for stage in training.mix.stages[1:]:
        first = stage.first_sample
        if followed.consumed_samples <= first < followed.samples_at_end(config):
            step = followed.steps_until(config, first)
            shares = ", ".join(f"{name} {weight:g}" for name, weight in stage.weights.items())
            yield (
                f"the stage {stage.place} begins after step {step:,}, at sample {first:,} (token {first * length:,}), "
                f"with weights {shares}"
            )
    same: dict[str, list[str]] = {}
    for name, source in training.sources.items():
        same.setdefault(content_id(source), []).append(name)
    for names in same.values():
        if len(names) > 1:
            yield f"{' and '.join(names)} of data.sources hold the same text, which is read for each of them"
    for name, source in training.sources.items():
        if source.samples_per_epoch < batch:
            samples = plural(source.samples_per_epoch, "sample")
            yield f"{name} of data.sources has {samples}, less than one batch of {batch}"
    yield from _notices_of_epochs(config, training, followed)


def _notices_of_epochs(config: Config, training: MixedSamples, followed: DataPosition) -> Iterator[str]:
    """Yields notices about a run that ends before the epochs of its sources, or reads more, by whole steps."""
    stop, left_out = followed.samples_at_end(config), followed.left_out_samples
    reason = f"rollbacks have left out {plural(left_out, 'sample')}, in whose place later ones are read"
    if config.data.is_by_epochs:
        size = training.mix.modulus
        if stop < size:
            yield f"the run ends when {stop / size:.0%} of the epochs of data.sources are read"
        if stop > size:
            why = reason if left_out else f"{size:,} is no multiple of a batch{_of_each_step(config)}"
            yield f"the run reads {plural(stop - size, 'sample')} more than the epochs of data.sources: {why}"
        return
    ends = [(-1, training.mix.counts(first)) for first, _ in followed.left_out]
    ends += [(1, training.mix.counts(end)) for _, end in followed.left_out]
    for number, (name, taken) in enumerate(zip(training.mix.names, training.mix.counts(stop), strict=True)):
        most = config.data.sources[name].max_epochs
        read = taken - sum(sign * counts[number] for sign, counts in ends)
        if most is not None and left_out and read > (limit := most * training.sources[name].samples_per_epoch):
            yield f"{name} gives {read - floor(limit):,} samples more than its max_epochs allow: {reason}"
