"""The whole config: one field per section. It is loaded once and frozen; the code below it reads no files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from megalite.config import auto
from megalite.config.base import Section
from megalite.config.batch_stages import BatchSchedule, shapes_of
from megalite.config.compression import CompressionConfig
from megalite.config.data import DataConfig
from megalite.config.deepspeed import check_pass_through, offloads_to_nvme
from megalite.config.model import ModelConfig
from megalite.config.path_or_url import local_run_dir
from megalite.config.schedule_phases import SchedulePhases, phases_of
from megalite.config.sections import (
    AdapterConfig,
    CheckpointConfig,
    GuardsConfig,
    LaunchConfig,
    MonitorConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelConfig,
    PerformanceConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
    TrainingConfig,
    WatchdogConfig,
)
from megalite.config.suggestions import OptionPath
from megalite.config.yaml_text import to_yaml


class Config(Section):
    """All options of a run. Unknown names are refused; missing options have the defaults written here."""

    run_dir: Annotated[Path, AfterValidator(local_run_dir)] = Field(examples=["runs/mine"])
    """Folder of this run: its config, metrics, checkpoints and pictures."""

    model: ModelConfig
    """Shape and mathematics of the transformer; what it leaves out comes from `training.initialize_from`."""

    data: DataConfig
    """Prepared text of the run."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Division of the model and the batch among processes; `auto`: chosen when the run starts."""

    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    """Number formats."""

    compression: CompressionConfig = Field(default_factory=CompressionConfig)
    """What replicas send each other over slow links."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The update rule."""

    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """The learning rate over the run."""

    training: TrainingConfig
    """Batch, length and guards of the run."""

    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    """Trained matrices beside the model's weights, which then stay as they are."""

    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    """Activations recomputed instead of kept; `auto`: chosen with the layout."""

    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    """Memory of the host in place of the GPU's."""

    performance: PerformanceConfig = Field(default_factory=PerformanceConfig)
    """Compilation and kernels."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving of the run's state, and which checkpoints are kept."""

    guards: GuardsConfig = Field(default_factory=GuardsConfig)
    """Policies for bad steps."""

    watchdog: WatchdogConfig = Field(default_factory=WatchdogConfig)
    """Limits after which a run without progress is ended."""

    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    """Reporting of the run."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """Settings of the local launcher for ranks on a CPU."""

    deepspeed: Annotated[
        dict[str, Any],
        AfterValidator(check_pass_through),
        BeforeValidator(lambda value: {} if value is None else value),  # empty, as other sections may be
    ] = Field(default_factory=dict, examples=[{"steps_per_print": 100}])
    """Merged into the DeepSpeed config; refused if it contradicts another option."""

    _unresolved: frozenset[OptionPath] = PrivateAttr(default=frozenset())
    _done: tuple[int, int] = PrivateAttr(default=(0, 0))  # steps and tokens before `training.tokens` is counted on
    _samples_per_epoch: int | None = PrivateAttr(default=None)  # of the data, once it is open

    @model_validator(mode="wrap")
    @classmethod
    def _replace_auto(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, dict):
            return handler(values)
        stated, unresolved = auto.take_out(values)
        config = handler(stated)
        has_one_stage = auto.PIPELINE not in unresolved and config.parallel.pipeline_parallel_size == 1
        config._unresolved = unresolved - {auto.SCHEDULE} if has_one_stage else unresolved
        return config

    @model_serializer(mode="wrap")
    def _restore_auto(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return auto.put_back(handler(self), self._unresolved)

    @property
    def unresolved_options(self) -> frozenset[OptionPath]:
        """Options of a layout set to `auto`. They hold placeholders until it is chosen; no run trains with
        placeholders. Empty where no more than `open_options` is to be chosen."""
        return self._unresolved & auto.CHOOSABLE if self._unresolved - auto.OPEN.keys() else frozenset()

    @property
    def open_options(self) -> frozenset[OptionPath]:
        """Options that a run chooses for its layout, stated or not: a schedule that no config names, a wire's format
        set to `auto`."""
        return self._unresolved & auto.OPEN.keys()

    def with_resolved(self, chosen: Mapping[OptionPath, Any]) -> Config:
        """Returns a copy with these options of the layout set to `chosen`; `resolve_layout` checks them."""
        sections: dict[str, dict[str, Any]] = {}
        for (section, option), value in chosen.items():
            sections.setdefault(section, {})[option] = value
        resolved = self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )
        resolved._unresolved = self._unresolved - chosen.keys()
        return resolved

    def counted_from(self, step: int, tokens_seen: int, samples_per_epoch: int | None = None) -> Config:
        """Returns a copy whose `total_steps` counts `training.tokens` from a checkpoint on.

        Steps of the run before it may have had another batch size, so their number does not tell their tokens. The size
        of the data's epoch, once it is known, stays so.
        """
        counted = self.model_copy()
        counted._done = (step, tokens_seen)
        counted._samples_per_epoch = samples_per_epoch or self._samples_per_epoch
        return counted

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of one pass over the data; None before it is open."""
        return self._samples_per_epoch

    @property
    def phases(self) -> SchedulePhases | None:
        """The warm-up and decay in the schedule's unit; None while they are in epochs of data that is not open."""
        return phases_of(self.schedule, self.batches, self.total_steps, self._samples_per_epoch)

    @property
    def is_optimizer_offloaded(self) -> bool:
        """True if the optimizer's state is not on the device that computes: on the host, or on NVMe."""
        return self.offload.optimizer == "cpu" or offloads_to_nvme(self.deepspeed)

    @property
    def batches(self) -> BatchSchedule:
        """The batch of each step, from the checkpoint of `counted_from` on, or from the start."""
        return BatchSchedule(self.training, *self._done)

    def in_each_stage(self) -> list[Config]:
        """Returns a config without stages for the start of the run and for each of `training.stages`."""
        found = []
        for shape in shapes_of(self.training):
            values = {
                **{"global_batch_size": shape.global_batch_size, "sequence_length": shape.sequence_length},
                **{"micro_batch_size": shape.micro_batch_size, "stages": ()},
            }
            found.append(self.model_copy(update={"training": self.training.model_copy(update=values)}))
        return found

    @property
    def total_steps(self) -> int:
        """Length of the run in optimizer steps, those before the checkpoint of `counted_from` included."""
        training = self.training
        if training.steps is not None:
            return training.steps
        assert training.tokens is not None, "rules.py refuses a run without a length"
        step, tokens_seen = self._done
        return self.batches.steps_until(training.tokens) if training.tokens > tokens_seen else step

    def to_yaml(self) -> str:
        """Returns the config as YAML that loads to an equal one."""
        return to_yaml(self.model_dump(mode="json"))
