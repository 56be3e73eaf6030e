"""The whole config: one field per section. Loaded once, frozen, and handed down; nobody below reads files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from megalite.config import auto
from megalite.config.base import Section
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.deepspeed import check_pass_through
from megalite.config.errors import ConfigError
from megalite.config.guards import GuardsConfig
from megalite.config.launch import LaunchConfig
from megalite.config.layout import ResolvedLayout, resolve_layout, wanted_world_size
from megalite.config.model import ModelConfig
from megalite.config.monitor import MonitorConfig
from megalite.config.nearest import OptionPath
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.precision import PrecisionConfig
from megalite.config.recompute import RecomputeConfig
from megalite.config.rules import Situation, check_rules
from megalite.config.schedule import ScheduleConfig
from megalite.config.text import to_yaml
from megalite.config.training import TrainingConfig
from megalite.config.watchdog import WatchdogConfig


class Config(Section):
    """Everything a run is told; unknown names are refused, missing ones have the defaults written here."""

    run_dir: Path
    """Folder of this run: its config, metrics, checkpoints and pictures."""

    model: ModelConfig
    """Shape and mathematics of the transformer."""

    data: DataConfig
    """Which prepared token shards the run reads."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """How the model and the batch are cut over processes; `auto`: chosen when the run starts."""

    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    """Number formats."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The update rule."""

    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """The learning rate over the run."""

    training: TrainingConfig
    """Batch, length and guards of the run."""

    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    """Activations computed again instead of kept; `auto`: chosen with the layout."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When the run's state is saved, and what is kept."""

    guards: GuardsConfig = Field(default_factory=GuardsConfig)
    """What happens to a step that is not what it should be."""

    watchdog: WatchdogConfig = Field(default_factory=WatchdogConfig)
    """When a run that makes no progress is ended."""

    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    """Where the run reports."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """What the local launcher sets for ranks on a CPU."""

    deepspeed: Annotated[dict[str, Any], AfterValidator(check_pass_through)] = Field(default_factory=dict)
    """Merged into the DeepSpeed config; refused where it contradicts a setting of ours."""

    _open: frozenset[OptionPath] = PrivateAttr(default=frozenset())

    @model_validator(mode="wrap")
    @classmethod
    def _take_out_what_is_auto(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, dict):
            return handler(values)
        stated, left_open = auto.take_out(values)
        config = handler(stated)
        config._open = left_open
        return config

    @model_serializer(mode="wrap")
    def _show_what_is_auto(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return auto.put_back(handler(self), self._open)

    @property
    def open(self) -> frozenset[OptionPath]:
        """Options that say `auto`: they hold placeholders until a layout is chosen, and no run trains with those."""
        return self._open

    def settled(self, chosen: Mapping[OptionPath, Any]) -> Config:
        """With these options of the layout as chosen; what is right about them is for `check_world` to say."""
        sections: dict[str, dict[str, Any]] = {}
        for (section, option), value in chosen.items():
            sections.setdefault(section, {})[option] = value
        made = self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )
        made._open = self._open - chosen.keys()
        return made

    @property
    def total_steps(self) -> int:
        """Length of the run in optimizer steps."""
        training = self.training
        if training.steps is not None:
            return training.steps
        assert training.tokens is not None, "rules.py refuses a run without a length"
        return -(-training.tokens // (training.global_batch_size * training.sequence_length))

    def check_world(self, world_size: int, device: Literal["cpu", "cuda"]) -> ResolvedLayout:
        """The layout on `world_size` processes; ConfigError where it cannot work there, or is not chosen yet."""
        if self._open:
            raise ConfigError(
                f"the layout is not chosen yet ({auto.listed(self._open)}: auto): `megalite plan CONFIG.yaml --write "
                "FILE.yaml` chooses one and writes a config with it"
            )
        layout = resolve_layout(self, world_size)
        check_rules(self, Situation(layout.data_parallel_size, device))
        return layout

    def world_size_wanted(self, device_count: int | None) -> int:
        """Processes to start on this machine: `device_count` GPUs, or None for CPU ranks."""
        return wanted_world_size(self.parallel, device_count)

    def to_yaml(self) -> str:
        """The resolved config as YAML that loads to an equal one."""
        return to_yaml(self.model_dump(mode="json"))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON schema for editors, with every option's meaning."""
        schema = cls.model_json_schema()
        auto.allow_in(schema)
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "megalite config",
            **schema,
        }
