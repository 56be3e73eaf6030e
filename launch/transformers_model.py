"""transformers' side: finding a Hugging Face folder, here or on the hub, and loading it whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from launch.errors import LaunchError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
WEIGHTS, PICKLES = ["model*.safetensors"], ["pytorch_model*.bin"]
NOT_OF_THE_MODEL = ["*/*.json", "*/*.model", "consolidated*"]  # of original/, onnx/ and the like


def is_hub_id(place: str | Path) -> bool:
    """Whether `place` is no folder here, but reads like a model's id on the hub (`organisation/name`)."""
    return not Path(place).exists() and bool(HUB_ID.fullmatch(str(place)))


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
        raise LaunchError(f"{hub_id}: no folder here, and the hub did not give it: {_first_line(error)}") from None


def load_transformers_model(folder: Path, dtype: torch.dtype | str) -> Any:
    """transformers' model with the output head; LaunchError where it refuses or lacks weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            experts_implementation="eager",  # the fused one takes only widths of whole 16 bytes
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers raises is about the folder it was given
        raise LaunchError(f"{folder}: transformers cannot load it: {_first_line(error)}") from None
    if report["missing_keys"]:  # it would draw random numbers for them
        raise LaunchError(f"{folder}: transformers finds no weights for {', '.join(sorted(report['missing_keys']))}")
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise LaunchError(f"{folder}: transformers cannot load its tokenizer: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
