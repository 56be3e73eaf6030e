"""The options of a run: read once, checked before any process starts, then frozen.

In: a YAML file and `section.option=value` overrides. Out: a `Config`, or a `ConfigError` of one sentence. The sections
are in sections.py and model.py; to add an option, add one annotated field with a docstring to its section. Rules about
several options belong in rules.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalite.config.config import Config as Config
    from megalite.config.errors import ConfigError as ConfigError
    from megalite.config.layout import ResolvedLayout as ResolvedLayout
    from megalite.config.layout import resolve_layout as resolve_layout
    from megalite.config.layout import wanted_world_size as wanted_world_size
    from megalite.config.loading.load import load_config as load_config
    from megalite.config.loading.load import load_saved_config as load_saved_config
    from megalite.config.model import ModelConfig as ModelConfig
    from megalite.config.sections import LaunchConfig as LaunchConfig

_HOMES = {"Config": "config", "ConfigError": "errors", "LaunchConfig": "sections", "ModelConfig": "model"}
_HOMES |= dict.fromkeys(("ResolvedLayout", "resolve_layout", "wanted_world_size"), "layout")
_HOMES |= dict.fromkeys(("load_config", "load_saved_config"), "loading.load")


def __getattr__(name: str) -> Any:
    """Imports what is asked for; importing the rest of this folder, such as its errors, takes a tenth of a second."""
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value
