"""Locates Hugging Face folders, local or on the hub, and reads the model that their config.json describes.

Does not import torch, so that the configs of runs can be read, planned and checked without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_pipeline.path_suggestions import did_you_mean
from data_pipeline.storage.file_io import refuse_lfs_pointer
from launch.errors import LaunchError
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.json_files import CONFIG, read_json
from megalite.config import ModelConfig
from megalite.config.errors import describe_validation_error
from models.families import family, model_config
from models.hub.config_parts import FamilyError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
WEIGHTS, PICKLES = ["model*.safetensors"], ["pytorch_model*.bin"]
IGNORED = ["*/*.json", "*/*.model", "consolidated*"]  # in original/, onnx/ and the like
BASE_MODEL = "base_model"  # the key in the config of a run's manifests that names the model it began with
ENDS_OF_TURNS = "ends_of_turns"  # and the one with the tokens that end the answers and texts it was trained on


def is_hub_id(place: str | Path) -> bool:
    """True if `place` does not exist locally, but has the form of a hub id (`organisation/name`)."""
    return not Path(place).exists() and bool(HUB_ID.fullmatch(str(place)))


def is_hub_model(place: Path) -> bool:
    """True if `place` is a Hugging Face folder, or does not exist and has the form of a hub id."""
    return (place / CONFIG).is_file() or is_hub_id(place)


def lasting_place(place: Path) -> str:
    """Returns the absolute path of a folder, or a hub id, so that it means the same in any working directory."""
    return str(place) if is_hub_id(place) else str(place.resolve())


def fetched_folder(place: str | Path, *, weights: bool = True) -> Path:
    """Returns a folder, downloaded first if it is a hub id. Raises LaunchError, DataError for pointers of Git LFS."""
    if not is_hub_id(place):
        for pattern in (*SMALL_FILES, "*.safetensors", *PICKLES):
            for file in Path(place).glob(pattern):
                refuse_lfs_pointer(file)
        return Path(place)
    if Path(f"{place}.bin").is_file():
        raise LaunchError(f"{place}: is prepared data, no model: give the model, and --data {place} to evaluate it on")
    folder = _download(str(place), SMALL_FILES)
    if weights:
        _download(str(place), WEIGHTS)
        if not any(folder.glob("*.safetensors")):
            _download(str(place), PICKLES)
    return folder


def _download(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # its locks let one of several ranks on a machine download, and the others use the result
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=IGNORED))
    except Exception as error:  # network, permission, unknown id: the hub's errors have no common class
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, LocalEntryNotFoundError):  # neither here from before nor reached
            why = f"no connection: `hf download {hub_id} --local-dir FOLDER` where there is one, and give FOLDER"
        raise LaunchError(
            f"{hub_id}: there is no folder {Path(hub_id).absolute()}{did_you_mean(Path(hub_id))}, and the hub did not "
            f"give it: {why}"
        ) from None


def hub_config(place: Path) -> tuple[Path, ModelConfig]:
    """Returns the folder and the model of its config.json; does not download the weights of a hub id.

    Raises CheckpointError, FamilyError or LaunchError.
    """
    folder = fetched_folder(place, weights=False)
    return folder, model_of_config(read_json(folder / CONFIG), folder)


def model_of_config(hf_config: Mapping[str, Any], folder: Path) -> ModelConfig:
    """Returns the model that the config.json in `folder` describes. Raises CheckpointError or FamilyError naming it."""
    try:
        model = model_of(model_config(hf_config), str(folder / CONFIG))
        family(model.model_type).check(model)
    except FamilyError as error:
        raise FamilyError(f"{folder}: {error}") from None
    return model


def model_of(options: Any, where: str) -> ModelConfig:
    """Validates the options of a model. Raises CheckpointError naming their origin, `where`."""
    try:
        return ModelConfig.model_validate(options)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {describe_validation_error(error, ModelConfig)}") from None
