"""transformers' side: loading a Hugging Face folder whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from launch.errors import LaunchError
from launch.hub_folder import first_line


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
        raise LaunchError(f"{folder}: transformers cannot load it: {first_line(error)}") from None
    if report["missing_keys"]:  # it would draw random numbers for them
        raise LaunchError(f"{folder}: transformers finds no weights for {', '.join(sorted(report['missing_keys']))}")
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise LaunchError(f"{folder}: transformers cannot load its tokenizer: {first_line(error)}") from None
