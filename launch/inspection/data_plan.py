"""Shows what a run is going to read: of each source in each stage the samples, the tokens and the epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from pathlib import Path

from data_pipeline.audit.sample_contents import as_mix
from data_pipeline.samples.mix import MixedSamples
from launch.output import Table
from launch.runtime.logs import get_logger
from launch.trainer.data.opening import open_training
from launch.trainer.data.remote_data import find_or_fetch_copies, with_copies
from launch.trainer.data.run_mix import NEW_RUN, DataPosition, check_past, mixed
from launch.trainer.data.run_stages import check_past_batches
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest, find_latest, read_manifest, step_folders
from megalite.config import Config
from megalite.config.batch_stages import BatchSchedule
from megalite.units import count, epochs

log = get_logger(__name__)


@dataclass(frozen=True)
class PositionedData:
    """The training samples of a run, as it follows them from its newest checkpoint on."""

    config: Config  # counts its length from the position, and names copies in place of URLs
    samples: MixedSamples
    followed: DataPosition
    manifest: Manifest | None  # of the newest checkpoint
    places: Mapping[str, str]  # prefix of the copy of each URL

    @property
    def stop(self) -> int:
        """Number of samples that the run has consumed at its end."""
        return self.followed.samples_at_end(self.config)

    def step_of(self, k: int) -> int | None:
        """Returns the steps done before sample k; None of a past in which the batch size may have changed."""
        step, consumed = self.followed.step, self.followed.consumed_samples
        if k < consumed and consumed != BatchSchedule(self.config.training).samples_between(0, step):
            return None
        return self.followed.steps_at(self.config, k)


@dataclass(frozen=True)
class PlannedSource:
    """The samples of one source that one stage reads."""

    stage: int
    place: str  # as the config names it; "" for the start
    first_sample: int
    first_token: int
    first_step: int | None  # done before it
    source: str
    share: float
    samples: int
    tokens: int
    epochs: float  # of the whole run, at the end of the stage
    first_epoch_ends: int | None  # token of the run; None if it does not end in this stage
    max_epochs: float | None
    max_epochs_reached: int | None  # token of the run; None if it is not reached in this stage


def data_of(config: Config, checkpoints: Path) -> PositionedData:
    """Opens the training text of a run where its newest checkpoint has left it; of a new run, at its start.

    Raises DataError, or CheckpointError if the run has read something else so far, or if no checkpoint can be used.
    """
    places = find_or_fetch_copies(config.data, config.training.sequence_length, may_fetch=False, tell=log.info)
    config = config.model_copy(update={"data": with_copies(config.data, places)})
    training = open_training(config)
    own, skipped = find_latest(checkpoints) if step_folders(checkpoints) else (None, [])
    if own is None and skipped:
        raise CheckpointError(
            f"{checkpoints} holds no checkpoint that can be used, the newest because of this: {skipped[0]}; what the "
            "run has read is not known without one"
        )
    if own is None:
        return PositionedData(config, as_mix(training), NEW_RUN, None, places)
    for reason in skipped:
        log.warning(f"passed over: {reason}; taking {own} instead")
    manifest = read_manifest(own)
    followed = DataPosition.of(manifest.state)
    check_past_batches(manifest, config, own, "choose another run_dir")
    if isinstance(training, MixedSamples):
        training = mixed(config, training.sources, followed)
    check_past(training, followed, own, "choose another run_dir")
    return PositionedData(followed.counted(config), as_mix(training), followed, manifest, places)


def planned_sources(data: PositionedData) -> Iterator[PlannedSource]:
    """Yields what each stage of a run reads of each source, in order."""
    mix, length, stop = data.samples.mix, data.samples.sequence_length, data.stop
    stages = [stage for stage in mix.stages if stage.first_sample < max(1, stop)]
    bounds = [*(stage.first_sample for stage in stages), stop]
    for number, (stage, (first, end)) in enumerate(zip(stages, pairwise(bounds), strict=True)):
        before, after = mix.counts(first), mix.counts(end)
        for place, (name, source) in enumerate(data.samples.sources.items()):
            size = source.samples_per_epoch
            most = data.config.data.sources[name].max_epochs if name else None
            yield PlannedSource(
                stage=number,
                place=stage.place,
                first_sample=first,
                first_token=first * length,
                first_step=data.step_of(first),
                source=name,
                share=stage.weights.get(name, 0.0) / sum(stage.weights.values()),
                samples=after[place] - before[place],
                tokens=(after[place] - before[place]) * length,
                epochs=after[place] / size,
                first_epoch_ends=_token_of(data, place, size, before[place], after[place]),
                max_epochs=most,
                max_epochs_reached=_token_of(data, place, floor((most or 0) * size), before[place], after[place]),
            )


def _token_of(data: PositionedData, source: int, limit: int, before: int, after: int) -> int | None:
    """Returns the token at which a source has given `limit` samples; None unless that is between both counts."""
    if not before < limit <= after:
        return None
    k = data.samples.mix.sample_of(source, limit - 1)
    return None if k is None else (k + 1) * data.samples.sequence_length


def plan_table(rows: list[PlannedSource], prefixes: str) -> Table:
    """Returns the plan as a table; `prefixes` names the one text of a run without sources."""

    def token(value: int | None) -> str:
        return "" if value is None else count(value)

    lines: list[list[str] | None] = []
    for row in rows:
        if lines and row.source == rows[0].source:
            lines.append(None)  # a line between stages
        limit = "" if row.max_epochs is None else f" of {row.max_epochs:g}"
        step = "?" if row.first_step is None else f"{row.first_step:,}"
        lines.append(
            [
                row.source or prefixes, str(row.stage), step, token(row.first_token), f"{row.share:.4g}",
                f"{row.samples:,}", token(row.tokens), f"{epochs(row.epochs)}{limit}", token(row.first_epoch_ends),
                token(row.max_epochs_reached),
            ]
        )  # fmt: skip
    columns = [
        *("source", "stage", "after step", "from token", "share", "samples", "tokens", "epochs at its end"),
        *("first epoch ends at token", "max_epochs at token"),
    ]
    return Table(columns, lines, "data of the run")
