"""The options of a run: read once, checked before any process starts, then frozen.

In: a YAML file and `section.option=value` overrides. Out: a `Config`, or a `ConfigError` of one sentence. The sections
are in sections.py and model.py; to add an option, add one annotated field with a docstring to its section. Rules about
several options belong in rules.py.
"""

from megalite.config.config import Config
from megalite.config.errors import ConfigError
from megalite.config.layout import ResolvedLayout, resolve_layout, wanted_world_size
from megalite.config.loading.load import load_config, load_saved_config
from megalite.config.model import ModelConfig
from megalite.config.sections import LaunchConfig

__all__ = [
    "Config",
    "ConfigError",
    "LaunchConfig",
    "ModelConfig",
    "ResolvedLayout",
    "load_config",
    "load_saved_config",
    "resolve_layout",
    "wanted_world_size",
]
