"""transformers' side: finding a Hugging Face folder, here or on the hub, and loading it whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from launch.errors import LaunchError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


def local_folder(place: str | Path) -> Path:
    """The folder, or where `place` is none but reads like a hub id (`organisation/name`), its download."""
    if Path(place).exists() or not HUB_ID.fullmatch(str(place)):
        return Path(place)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(place), allow_patterns=HUB_FILES))
    except Exception as error:  # network, permission, unknown id: the hub's errors have no common class
        raise LaunchError(f"{place}: no folder here, and the hub did not give it: {_first_line(error)}") from None


def load_transformers_model(folder: Path, dtype: torch.dtype | str) -> Any:
    """transformers' model with the output head; LaunchError where it refuses or lacks weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
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
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise LaunchError(f"{folder}: transformers cannot load its tokenizer: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
