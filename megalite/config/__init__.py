"""Every option of a run: one file per section, read once, checked before any process starts, then frozen.

In: a YAML file and `section.option=value` overrides. Out: a `Config`, or a `ConfigError` of one sentence.
To add an option: one annotated field with a docstring in its section; rules about several go to rules.py.
"""

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError, describe_validation_error
from megalite.config.launch import LaunchConfig
from megalite.config.layout import ResolvedLayout
from megalite.config.load import load_config
from megalite.config.model import ModelConfig
from megalite.config.monitor import MonitorConfig, WandbConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.precision import PrecisionConfig
from megalite.config.recompute import RecomputeConfig
from megalite.config.root import Config
from megalite.config.schedule import ScheduleConfig
from megalite.config.training import EvaluationConfig, TrainingConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "LaunchConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "ResolvedLayout",
    "ScheduleConfig",
    "TrainingConfig",
    "WandbConfig",
    "describe_validation_error",
    "load_config",
]
