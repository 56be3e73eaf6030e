"""Loads models and tokenizers with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from launch.errors import LaunchError
from launch.huggingface.hub_folder import first_line


def load_transformers_model(folder: Path, dtype: torch.dtype | str) -> Any:
    """Loads a whole Hugging Face folder with the output head. Raises LaunchError if transformers refuses or lacks
    weights."""
    from transformers import AutoModelForCausalLM

    try:
        model, report = from_pretrained(
            AutoModelForCausalLM, folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers raises is about the folder it was given
        raise LaunchError(f"{folder}: transformers cannot load it: {first_line(error)}") from None
    if report["missing_keys"]:  # transformers would initialize them at random
        raise LaunchError(f"{folder}: transformers finds no weights for {', '.join(sorted(report['missing_keys']))}")
    return model


def from_pretrained(kind: Any, folder: Path | None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the model of class `kind` in evaluation mode, and which weights were missing or unexpected."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    # fused experts accept only widths that are multiples of 16 bytes, and change from version to version
    model, report = kind.from_pretrained(folder, experts_implementation="eager", output_loading_info=True, **options)
    return model.eval(), report


def load_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of a folder. Raises LaunchError if transformers refuses."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise LaunchError(f"{folder}: transformers cannot load its tokenizer: {first_line(error)}") from None
