"""Rules about stages, where they begin and what `training.stages` change: a sentence with a remedy for each one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from megalite.config.batch_stages import sample_length, shapes_of
from megalite.config.suggestions import multiples_near
from megalite.config.training_stage import StageStart

if TYPE_CHECKING:
    from megalite.config.config import Config

MICRO_BATCH = ("training", "micro_batch_size")
BatchRules = Callable[["Config"], Iterator[str]]
"""Yields the sentences of rules about the batch of a config, as if it had that batch from start to end."""


def problem_with_place(option: str, number: int, stage: StageStart) -> str | None:
    """Returns why a stage of `option` does not say where it begins; None if it does."""
    if (stage.from_tokens is None) != (stage.from_steps is None):
        return None
    which = "both" if stage.from_tokens is not None else "neither"
    return f"stage {number} of {option} has {which} of from_tokens and from_steps: give one of them, where it begins"


def problems_with_order(option: str, stages: Sequence[StageStart], first_tokens: Sequence[int]) -> Iterator[str]:
    """Yields a sentence for each stage of `option` that does not begin after the one before it."""
    for number, (before, after) in enumerate(pairwise(first_tokens)):
        if after <= before:
            yield (
                f"stage {number + 1} of {option} ({stages[number + 1].place}) begins at token {after:,}, not after "
                f"stage {number} ({stages[number].place}) at token {before:,}: write the stages in their order"
            )


def problems_with_stages(config: Config, rules: BatchRules) -> Iterator[str]:
    """Yields a sentence for each broken rule about stages; `rules` hold in each of them."""
    if not (stages := config.training.stages):
        return
    for number, stage in enumerate(stages):
        if problem := problem_with_place("training.stages", number, stage):
            yield problem
            return
        if not any((stage.global_batch_size, stage.sequence_length, stage.micro_batch_size)):
            yield (
                f"stage {number} of training.stages changes nothing: give it a global_batch_size, a sequence_length or "
                "a micro_batch_size, or remove it"
            )
        if stage.micro_batch_size is not None and MICRO_BATCH in config.unresolved_options:
            yield (
                f"stage {number} of training.stages states a micro_batch_size, and training.micro_batch_size is auto, "
                "which chooses one for all stages: state both, or leave it out of the stages"
            )
    yield from problems_with_order("training.stages", stages, _first_tokens(config))
    told = set(rules(config))
    for number, in_stage in enumerate(config.in_each_stage()[1:]):
        sentences = [sentence for sentence in rules(in_stage) if sentence not in told]
        yield from (f"in stage {number} of training.stages: {sentence}" for sentence in sentences)
        told.update(sentences)
    yield from _lengths(config)


def _first_tokens(config: Config) -> list[int]:
    """Returns the token at which each stage begins, before it is rounded up to a step."""
    step, tokens, found = 0, 0, []
    shapes = shapes_of(config.training)
    for stage, shape in zip(config.training.stages, shapes, strict=False):
        found.append(stage.from_tokens or 0)
        if stage.from_steps is not None:
            found[-1] = tokens + (stage.from_steps - step) * shape.tokens
        steps = max(0, -((tokens - found[-1]) // shape.tokens))
        step, tokens = step + steps, tokens + steps * shape.tokens
    return found


def _lengths(config: Config) -> Iterator[str]:
    """Yields what is broken where sequences have several lengths: each sample must be read in whole parts."""
    training, longest = config.training, sample_length(config.training)
    shapes = shapes_of(training)
    if all(shape.sequence_length == longest for shape in shapes):
        return
    if config.data.packing == "best_fit":
        yield (
            "training.stages change the sequence_length, and data.packing best_fit packs whole documents for one "
            "length, so that shorter sequences would cut them: use packing concat, or one sequence_length"
        )
    for number, shape in enumerate(shapes):
        of = f" in stage {number - 1} of training.stages" if number else ""
        length = shape.sequence_length
        if longest % length:
            fitting = [divisor for divisor in range(1, longest + 1) if longest % divisor == 0]
            near = min(fitting, key=lambda divisor: abs(divisor - length))
            yield (
                f"training.sequence_length {length}{of} does not divide {longest}, the longest of the run, whose "
                f"samples it is cut from: use {near}"
            )
        elif shape.global_batch_size % shape.parts:
            yield (
                f"training.global_batch_size {shape.global_batch_size}{of} is not a multiple of {shape.parts}, the "
                f"sequences of {length} in a sample of {longest}, the longest of the run: use "
                f"{multiples_near(shape.global_batch_size, shape.parts)}"
            )
