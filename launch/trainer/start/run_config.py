"""Loads the config of a run and completes it: options of `model` from weights or family, prefixes from patterns.

So a config for a Hugging Face model need not copy sizes, and the run's own config.yaml has all of them: a resume does
not need the model's folder any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from data_pipeline.errors import DataError
from launch.conversion.huggingface.folder_lookup import hub_config, is_hub_model
from launch.errors import LaunchError
from launch.runtime.logs import get_logger
from launch.runtime.rank_environment import Rank
from launch.trainer.data.path_patterns import with_prefixes
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.json_files import refuse_adapter
from megalite.checkpoint.manifest import find_latest, no_checkpoint, read_manifest
from megalite.config import Config, ConfigError, ModelConfig, load_config
from megalite.config.model import DROPOUTS
from models.families import FAMILIES

if TYPE_CHECKING:
    from launch.prediction.device_facts import RankDevice

log = get_logger(__name__)
Options = dict[str, Any]
NO_LENGTH = "a run needs a length"  # as a rule of `megalite.config` begins
ENDLESS = 1 << 40  # steps
READING_THE_LENGTH = ("dynamic", "yarn", "longrope")  # types of rope_scaling


def load_run_config(path: Path, overrides: Sequence[str] = (), *, needs_length: bool = True) -> Config:
    """Loads and completes a config. Raises ConfigError, CheckpointError, FamilyError or LaunchError.

    Without `needs_length` a config that sets none is taken as one of a run that does not end.
    """

    def complete(values: Options) -> Options:
        return _with_model(with_prefixes(values if needs_length else _without_end(values)))

    try:
        return load_config(path, overrides, complete=complete)
    except ConfigError as error:
        at = next((n for n, sentence in enumerate(error.sentences) if NO_LENGTH in sentence), None)
        if at is None or (known := _length_of_epochs(path, overrides)) is None:
            raise
        sentences = [*error.sentences]
        sentences[at] = f"{sentences[at].partition(NO_LENGTH)[0]}{NO_LENGTH}: {known}"
        raise ConfigError(*sentences) from None


def _without_end(values: Options) -> Options:
    training = values.get("training")
    if not isinstance(training, dict) or training.get("steps") or training.get("tokens"):
        return values
    return values | {"training": training | {"steps": ENDLESS}}


def _length_of_epochs(path: Path, overrides: Sequence[str]) -> str | None:
    """Returns how many steps the epochs of the sources come to, and what to set; None if it says no epochs."""
    from launch.trainer.data.opening import open_training
    from launch.trainer.data.run_mix import epochs_in_steps

    try:
        config = load_run_config(path, overrides, needs_length=False)
        if not config.data.is_by_epochs or config.data.urls:
            return None
        said, steps = epochs_in_steps(config, open_training(config))
    except ConfigError:
        return None  # the problems beside the length are in the same message
    except DataError as error:
        return f"how many steps the epochs of data.sources come to is not known yet ({error})"
    return f"{said}: set training.steps to {steps}"


def with_layout_for_all(config: Config, rank: Rank, devices: Sequence[RankDevice]) -> Config:
    """Resolves the options that are `auto` for these devices of all ranks; rank 0 chooses, so that all ranks get the
    same. Collective."""
    from launch.prediction.auto_layout import choose_together

    chosen = choose_together(config, devices)
    if rank.rank == 0:
        log.info(chosen.sentence)
    return config.with_resolved(chosen.options)


def _with_model(values: dict[str, Any]) -> dict[str, Any]:
    training, given = values.get("training"), values.get("model") or {}
    if not isinstance(given, dict):
        return values
    source = training.get("initialize_from") if isinstance(training, dict) else None
    known: Mapping[str, Any] | None = None
    if isinstance(source, str):
        known = _model_of_the_run(values.get("run_dir")) or _model_of(Path(source), given)
    if known is None and str(given.get("model_type")) in FAMILIES:
        known = FAMILIES[given["model_type"]].all_fixed
    return values if known is None else values | {"model": {**known, **given}}


def _model_of_the_run(run_dir: object) -> dict[str, Any] | None:
    """Returns the model of the run's newest checkpoint, which counts more than what the run started from."""
    root = Path(run_dir) / "checkpoints" if isinstance(run_dir, str) else None
    newest = find_latest(root)[0] if root is not None and root.is_dir() else None
    return read_manifest(newest).config.get("model") if newest is not None else None


def _model_of(source: Path, given: Options) -> dict[str, Any] | None:
    if not is_hub_model(source):
        return read_manifest(checkpoint_at(source)).config.get("model")
    folder, theirs = hub_config(source)
    known = theirs.model_dump(mode="json")
    with suppress(ValidationError):  # reported later, with its place in the file
        refuse_other_model(ModelConfig.model_validate(known | given), theirs, given, f"{folder}/config.json")
    return known


def checkpoint_at(source: Path) -> Path:
    """Returns the newest complete checkpoint of `training.initialize_from`. Raises CheckpointError."""
    refuse_adapter(source)
    weights, reasons = find_latest(source)
    if weights is None:
        start = "" if source.is_absolute() else " (relative paths start from the working directory)"
        why = reasons[0] if reasons else f"{no_checkpoint(source.absolute())}{start}"
        raise CheckpointError(
            f"training.initialize_from {source} is no checkpoint, no Hugging Face folder (with a config.json) and no "
            f"hub id (organisation/name): {why}"
        )
    return weights


def refuse_other_model(ours: ModelConfig, theirs: ModelConfig, options: Iterable[str], where: str) -> None:
    """Raises LaunchError for the first of `options` that makes `ours` another function of the same weights."""
    free = {*DROPOUTS, "initializer_range"}
    if not reads_the_length(theirs):
        free.add("max_position_embeddings")
    for name in options:
        if name not in free and getattr(ours, name) != getattr(theirs, name):
            raise LaunchError(
                f"model.{name} is {_shown(getattr(ours, name))} in this config and {_shown(getattr(theirs, name))} in "
                f"{where}: leave it out, or set it alike"
            )


def reads_the_length(model: ModelConfig) -> bool:
    """Returns whether the same weights compute something else with another `max_position_embeddings`."""
    scaling = model.rope_scaling
    return model.position_embedding != "rope" or (scaling is not None and scaling.rope_type in READING_THE_LENGTH)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
