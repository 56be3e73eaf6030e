"""Opens a Hugging Face model from which a run starts without a conversion.

Every defect of the folder is found here, from config.json and the headers of its files, before a rank reads weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.tokenizer import load_tokenizer
from launch.errors import LaunchError
from launch.huggingface.hub_folder import local_folder
from launch.huggingface.model_folder import open_model_folder
from megalite.checkpoint.durable_files import digest
from megalite.checkpoint.huggingface.folder import tokenizer_files
from megalite.checkpoint.huggingface.reader import HubReader
from megalite.config import ModelConfig

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class HubModel:
    """A Hugging Face folder whose tensors are all known."""

    folder: Path
    model: ModelConfig
    carried: dict[str, Any]  # for exports: special tokens, generation settings, dtypes
    tokenizer_sha256: str | None  # of its tokenizer.json; None if it has none
    reader: HubReader
    fingerprint: str  # hash of options and file sizes, which must be equal on all hosts

    def check_tokenizer(self, data: Path, prepared_with: str | None, sha256: str | None) -> None:
        """Raises LaunchError if `data` was prepared with another tokenizer: its ids would mean other text here."""
        if sha256 is None or self.tokenizer_sha256 in (None, sha256):
            return
        if prepared_with is not None and is_same_tokenizer(Path(prepared_with), sha256, self.folder / TOKENIZER):
            return
        raise LaunchError(
            f"{data} was prepared with another tokenizer ({prepared_with}) than that of {self.folder}, so its ids mean "
            f"other text to this model: prepare it again with --tokenizer {self.folder}, or, if the model is meant to "
            "learn those ids, put that tokenizer's files into the model's folder"
        )


def open_hub_model(place: Path) -> HubModel:
    """Opens a folder or hub id. Raises CheckpointError, FamilyError or LaunchError if it is missing or unsupported."""
    opened = open_model_folder(local_folder(place))
    files, folder = opened.files, opened.files.folder
    tokenizer = folder / TOKENIZER
    sizes = {name: (folder / name).stat().st_size for name in files.files}
    identity = json.dumps([opened.model.model_dump(mode="json"), sizes], sort_keys=True)
    return HubModel(
        folder,
        opened.model,
        opened.carried(),
        digest(tokenizer).sha256 if tokenizer.is_file() else None,
        HubReader(folder, files.read, opened.layout, opened.shapes),
        hashlib.sha256(identity.encode()).hexdigest(),
    )


def is_same_tokenizer(place: Path, sha256: str, other: Path) -> bool:
    """True if the tokenizer at `place` still has this hash and equals another one, formatting aside."""
    path = next((path for path in tokenizer_files(place) if path.name == TOKENIZER), None)
    if path is None or digest(path).sha256 != sha256:
        return False
    return load_tokenizer(path).to_str() == load_tokenizer(other).to_str()
