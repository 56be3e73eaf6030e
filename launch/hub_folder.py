"""A Hugging Face folder without its weights: found here or on the hub, and the model that its config.json describes.

No torch, so that configs of runs are read, planned and checked without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launch.errors import LaunchError
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.hub_json import CONFIG, read_json
from megalite.config import ModelConfig, describe_validation_error
from models.families import FamilyError, family, model_config

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
WEIGHTS, PICKLES = ["model*.safetensors"], ["pytorch_model*.bin"]
NOT_OF_THE_MODEL = ["*/*.json", "*/*.model", "consolidated*"]  # of original/, onnx/ and the like


def is_hub_id(place: str | Path) -> bool:
    """Whether `place` is no folder here, but reads like a model's id on the hub (`organisation/name`)."""
    return not Path(place).exists() and bool(HUB_ID.fullmatch(str(place)))


def is_hub_model(place: Path) -> bool:
    """Whether `place` is a Hugging Face folder, or, where there is nothing, reads like a hub id."""
    return (place / CONFIG).is_file() or is_hub_id(place)


def local_folder(place: str | Path, *, weights: bool = True) -> Path:
    """The folder, or where `place` is a hub id its download, perhaps without weights. Raises LaunchError."""
    if not is_hub_id(place):
        return Path(place)
    folder = _download(str(place), SMALL_FILES)
    if weights:
        _download(str(place), WEIGHTS)
        if not any(folder.glob("*.safetensors")):
            _download(str(place), PICKLES)
    return folder


def _download(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # where several ranks of a machine ask, its locks let one download and the others find what that one has got
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=NOT_OF_THE_MODEL))
    except Exception as error:  # network, permission, unknown id: the hub's errors have no common class
        raise LaunchError(f"{hub_id}: no folder here, and the hub did not give it: {first_line(error)}") from None


def hub_config(place: Path) -> tuple[Path, ModelConfig]:
    """The folder and what its config.json says; of a hub id no weights are downloaded.

    Raises CheckpointError, FamilyError or LaunchError, one sentence.
    """
    folder = local_folder(place, weights=False)
    return folder, model_of_config(read_json(folder / CONFIG), folder)


def model_of_config(hf_config: Mapping[str, Any], folder: Path) -> ModelConfig:
    """The model that the config.json in `folder` describes. Raises CheckpointError or FamilyError that name it."""
    try:
        model = model_of(model_config(hf_config), str(folder / CONFIG))
        family(model.model_type).check(model)
    except FamilyError as error:
        raise FamilyError(f"{folder}: {error}") from None
    return model


def model_of(options: Any, where: str) -> ModelConfig:
    """The model that `options` describe. Raises CheckpointError, one sentence, that says where they are from."""
    try:
        return ModelConfig.model_validate(options)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {describe_validation_error(error, ModelConfig)}") from None


def first_line(error: Exception) -> str:
    """Of what a library says, for a sentence of ours."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
