"""The batch of each step: how many sequences of which length, as a pure function of the config and the step.

A run has one shape of batch, or several in stages (`training.stages`). A sample of the data is as long as the longest
sequence of the run; where a stage has shorter sequences, each sample is read as several of them, its parts, in a row.
So a step always reads whole samples, and consumed samples say where the data goes on, whichever shape comes next.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config.sections import TrainingConfig


@dataclass(frozen=True)
class BatchShape:
    """The shape of a step's global batch."""

    global_batch_size: int  # sequences per step
    sequence_length: int
    micro_batch_size: int
    parts: int = 1  # sequences that one sample of the data is read as

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch_size * self.sequence_length

    @property
    def samples(self) -> int:
        """Samples of the data per step."""
        return self.global_batch_size // self.parts

    def micro_batches(self, data_parallel_size: int) -> int:
        """Returns the micro-batches per step on one replica."""
        return self.global_batch_size // (self.micro_batch_size * data_parallel_size)


class BatchStretch(NamedTuple):
    """Neighbouring steps of one shape."""

    step: int  # steps that are done before
    tokens: int  # tokens seen before
    shape: BatchShape
    place: str  # of the stage that begins them; "" for the run's start


class BatchSchedule:
    """The shapes of the steps that come after a position of a run."""

    def __init__(self, training: TrainingConfig, step: int = 0, tokens_seen: int = 0) -> None:
        self.step, self.tokens_seen = step, tokens_seen
        self.sample_length = sample_length(training)
        self.stretches = _stretches(training, step, tokens_seen)
        self._steps = [stretch.step for stretch in self.stretches]
        self._tokens = [stretch.tokens for stretch in self.stretches]

    def shape_after(self, step: int) -> BatchShape:
        """Returns the shape of the step that comes after `step` steps."""
        return self._at_step(step).shape

    def tokens_after(self, step: int) -> int:
        """Returns the tokens seen when `step` steps are done."""
        begin = self._at_step(step)
        return begin.tokens + (step - begin.step) * begin.shape.tokens

    def samples_between(self, first: int, stop: int) -> int:
        """Returns the samples of the steps after `first` steps, until `stop` steps are done."""
        return (self.tokens_after(stop) - self.tokens_after(first)) // self.sample_length

    def steps_at(self, tokens: int) -> int:
        """Returns how many steps are done when `tokens` tokens are seen, the last of them perhaps in part."""
        begin = self.stretches[max(0, bisect_right(self._tokens, tokens) - 1)]
        return begin.step + (tokens - begin.tokens) // begin.shape.tokens

    def steps_until(self, tokens: int) -> int:
        """Returns the fewest steps with which `tokens` tokens are seen."""
        step = self.steps_at(tokens)
        return step if self.tokens_after(step) >= tokens else step + 1

    def steps_left(self, step: int, total_steps: int) -> float:
        """Returns the steps from `step` on, in steps like the last one: those of other stages count by their tokens."""
        left = self.tokens_after(max(step, total_steps)) - self.tokens_after(step)
        return left / self.shape_after(max(0, step - 1)).tokens

    def _at_step(self, step: int) -> BatchStretch:
        return self.stretches[max(0, bisect_right(self._steps, step) - 1)]


def sample_length(training: TrainingConfig) -> int:
    """Returns the tokens of one sample of the data: the longest sequence of the run."""
    return max([training.sequence_length, *(stage.sequence_length or 0 for stage in training.stages)])


def shapes_of(training: TrainingConfig) -> list[BatchShape]:
    """Returns the shape at the start of the run and that of each stage, in order, whether or not they are reached."""
    longest, shapes = sample_length(training), list[BatchShape]()
    batch, length, micro_batch = training.global_batch_size, training.sequence_length, training.micro_batch_size
    for stage in (None, *training.stages):
        if stage is not None:
            batch, length = stage.global_batch_size or batch, stage.sequence_length or length
            micro_batch = stage.micro_batch_size or micro_batch
        shapes.append(BatchShape(batch, length, micro_batch, longest // length))
    return shapes


def largest_shape(training: TrainingConfig) -> BatchShape:
    """Returns the shape that needs most memory: of the largest micro-batches, and of these the one with most of them;
    of two like that the one of longer sequences."""

    def size(shape: BatchShape) -> tuple[int, int, int]:
        return shape.micro_batch_size * shape.sequence_length, shape.tokens, shape.sequence_length

    return max(shapes_of(training), key=size)


def _stretches(training: TrainingConfig, step: int, tokens: int) -> tuple[BatchStretch, ...]:
    """Returns the stretches from a position on; of two that begin with the same step the second one alone."""
    shape, *others = shapes_of(training)
    found = [BatchStretch(step, tokens, shape, "")]
    for stage, following in zip(training.stages, others, strict=True):
        if stage.from_steps is not None:
            steps = stage.from_steps - step
        else:
            steps = -((tokens - (stage.from_tokens or 0)) // shape.tokens)
        steps = max(0, steps)  # one that has begun before the position counts from there
        if not steps:
            found.pop()
        step, tokens, shape = step + steps, tokens + steps * shape.tokens, following
        found.append(BatchStretch(step, tokens, shape, stage.place))
    return tuple(found)
