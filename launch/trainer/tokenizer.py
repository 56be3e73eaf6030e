"""Finds the tokenizer of a run's model, which exports of its checkpoints contain.

A run that starts from a Hugging Face model keeps a copy of that model's tokenizer, `run_dir/model_tokenizer`: it has
more files than the one that prepared the data, such as chat templates, and a resume does not need the model's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.trainer.data import RunData
from megalite.checkpoint.durable_files import digest, remove
from megalite.config import Config


@dataclass(frozen=True)
class KnownTokenizer:
    """Folder and digest of a tokenizer, as in a checkpoint's manifest."""

    folder: str | None
    sha256: str | None  # of its tokenizer.json


def keep_tokenizer(config: Config, model_folder: Path) -> None:
    """Copies the tokenizer of a Hugging Face model into the run's folder."""
    from megalite.checkpoint.huggingface.folder import copy_tokenizer, tokenizer_files  # pulls in torch

    kept = _kept(config)
    remove(kept)
    kept.mkdir()
    copy_tokenizer(tokenizer_files(model_folder), kept)


def tokenizer_of(config: Config, data: RunData) -> KnownTokenizer:
    """Returns the kept tokenizer, or else the one that prepared the data."""
    kept = _kept(config)
    if not kept.is_dir() or not any(kept.iterdir()):
        return KnownTokenizer(data.tokenizer, data.tokenizer_sha256)
    path = kept / "tokenizer.json"
    return KnownTokenizer(str(kept.resolve()), digest(path).sha256 if path.is_file() else None)


def _kept(config: Config) -> Path:
    return config.run_dir / "model_tokenizer"
