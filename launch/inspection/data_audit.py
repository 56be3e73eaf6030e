"""Answers what a step of a run has read or is going to read, and which of its steps read a document.

In: the run's config, its newest checkpoint and metrics.jsonl. Nothing was recorded for it but the samples of each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from data_pipeline.audit.sample_contents import SampleContent, content_of, readings_of
from data_pipeline.tokenizers.reading import inspect_tokenizer, with_limits
from launch.checkpoints.listing import CHECKPOINTS
from launch.conversion.huggingface.checkpoint_tokenizer import KEPT
from launch.errors import LaunchError
from launch.inspection.data_plan import PositionedData, data_of
from launch.inspection.run_files import CONFIG, check_is_run
from launch.trainer.data.run_mix import DataPosition
from launch.trainer.start.run_config import load_run_config
from megalite.checkpoint.huggingface.tokenizer_folder import TOKENIZER
from megalite.monitor.sinks.jsonl import METRICS, stream_records

When = Literal["read", "skipped", "left out", "unknown", "to come"]
MEANINGS: dict[When, str] = {
    "read": "trained on",
    "skipped": "read in a step that was skipped, so that it changed no weight",
    "left out": "consumed before a rollback, whose steps are undone",
    "unknown": "consumed in a step that metrics.jsonl does not name",
    "to come": "not read yet",
}


@dataclass(frozen=True)
class StepSamples:
    """The samples [first, stop) of a step."""

    step: int
    first: int
    stop: int
    when: When


@dataclass(frozen=True)
class StepReading:
    """One sample that reads a document, and the step that takes it."""

    k: int
    step: int | None  # None for a sample that a rollback has left out, or whose step metrics.jsonl does not name
    source: str
    epoch: int
    when: When


@dataclass(frozen=True)
class AuditedRun:
    """A run's data, and the samples of the steps that it has done."""

    run_dir: Path
    data: PositionedData
    done: Sequence[StepSamples]  # in order

    @classmethod
    def open(cls, run_dir: Path) -> AuditedRun:
        """Opens a run by its folder. Raises LaunchError, ConfigError, DataError or CheckpointError."""
        check_is_run(run_dir)
        data = data_of(load_run_config(run_dir / CONFIG), run_dir / CHECKPOINTS)
        steps = (_done(record) for record in stream_records(run_dir / METRICS) if "samples" in record)
        done = {one.step: one for one in steps}
        return cls(run_dir, data, [done[step] for step in sorted(done)])

    @property
    def notice(self) -> str | None:
        """A notice for the user if no checkpoint says what the run has read."""
        if self.data.manifest is not None:
            return None
        return (
            f"{self.run_dir / CHECKPOINTS} holds no checkpoint to compare with: this is what the run has read if its "
            "config and data are still those that it started with"
        )

    def samples_of(self, step: int) -> StepSamples:
        """Returns the samples of a step, done or to come. Raises LaunchError if the run has no such step."""
        config = self.data.config
        if found := next((one for one in self.done if one.step == step), None):
            return found
        last = self._last
        if not last.step < step <= config.total_steps:
            known = f"the run has steps 1 to {config.total_steps:,}"
            if 1 <= step <= last.step:
                known = f"{self.run_dir / METRICS} has no record of it"
            raise LaunchError(f"--step {step}: {known}")
        first, stop = (last.stop + config.batches.samples_between(last.step, done) for done in (step - 1, step))
        return StepSamples(step, first, stop, "to come")

    def contents(self, samples: StepSamples) -> Iterator[SampleContent]:
        """Yields what each sample of a step holds."""
        urls = {Path(copy): url for url, copy in self.data.places.items()}
        for k in range(samples.first, samples.stop):
            content = content_of(self.data.samples, k)
            documents = [
                replace(document, prefix=urls.get(Path(document.prefix), document.prefix))
                for document in content.documents
            ]
            yield replace(content, documents=documents)

    def text_of(self, k: int) -> str:
        """Returns the text of the inputs of sample k."""
        place = self.run_dir / KEPT / TOKENIZER
        if not place.is_file():
            raise LaunchError(f"{place} is not there, so that ids cannot be turned into text: leave out --text")
        ids = self.data.samples.sample(k).tokens[:-1].tolist()
        file = inspect_tokenizer(place)
        return str(with_limits(file, lambda: file.load().decode(ids, skip_special_tokens=False)))

    def readings(self, named: str) -> list[StepReading]:
        """Returns the samples of the run, from its start to its end, that read a document `SOURCE_OR_PREFIX:NUMBER`."""
        prefix, document = self._document(named)
        last, config = self._last, self.data.config
        stop = last.stop + config.batches.samples_between(last.step, max(last.step, config.total_steps))
        steps = iter([*self.done, StepSamples(-1, last.stop, stop, "to come")])
        current, found = next(steps), []
        before = StepSamples(0, 0, 0, "read")
        at_last = DataPosition(last.step, config.batches.tokens_after(last.step), last.stop)
        for reading in readings_of(self.data.samples, prefix, document, stop):
            while reading.k >= current.stop:
                before, current = current, next(steps)
            step: int | None = current.step
            when = current.when
            if reading.k < current.first:
                is_between = current.step == before.step + 1  # two steps in a row, with samples of none between
                is_left_out = is_between or any(begin <= reading.k < end for begin, end in self.data.followed.left_out)
                step, when = None, "left out" if is_left_out else "unknown"
            elif step == -1:
                step = at_last.steps_at(config, reading.k) + 1
            found.append(StepReading(reading.k, step, reading.source, reading.epoch, when))
        return found

    @property
    def _last(self) -> StepSamples:
        """The last step that was done; of a run without records, that of its newest checkpoint."""
        followed = self.data.followed
        saved = StepSamples(followed.step, followed.consumed_samples, followed.consumed_samples, "read")
        return max([saved, *self.done[-1:]], key=lambda one: one.step)

    def _document(self, named: str) -> tuple[Path, int]:
        name, colon, number = named.rpartition(":")
        if not colon or not number.isdecimal():
            raise LaunchError(f"--document {named}: give SOURCE:NUMBER or PREFIX:NUMBER, such as data/web:88211")
        data, name = self.data.config.data, self.data.places.get(name, name)
        if name in data.sources and (prefixes := data.sources[name].path):
            if len(prefixes) > 1:
                raise LaunchError(
                    f"--document {named}: {name} has several prefixes, each with documents from 0 on: give one of "
                    f"{', '.join(prefixes)} in its place"
                )
            return Path(prefixes[0]), int(number)
        if Path(name) not in map(Path, data.prefixes):
            raise LaunchError(
                f"--document {named}: the run reads no {name}, but {', '.join([*data.sources, *data.prefixes])}"
            )
        return Path(name), int(number)


def _done(record: dict[str, object]) -> StepSamples:
    step, samples = record["step"], record["samples"]
    assert isinstance(step, int) and isinstance(samples, list)
    first, stop = samples
    return StepSamples(step, first, stop, "skipped" if record.get("skipped") else "read")
