"""The tokenizer that belongs to a run's model: what exports of its checkpoints are given.

A run that starts from a Hugging Face model keeps a copy of that model's own, `run_dir/model_tokenizer`: it has more
files than the data was prepared with, chat templates among them, and a resume needs the model's folder no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.data import RunData
from megalite.checkpoint.files import digest, remove
from megalite.config import Config


@dataclass(frozen=True)
class KnownTokenizer:
    """Where it lies, as a checkpoint's manifest says it."""

    folder: str | None
    sha256: str | None  # of its tokenizer.json


def keep_tokenizer(config: Config, model_folder: Path) -> None:
    """Copies the tokenizer of a Hugging Face model into the run's folder."""
    from megalite.checkpoint.hugging_face import copy_tokenizer, tokenizer_files  # pulls in torch

    kept = _kept(config)
    remove(kept)
    kept.mkdir()
    copy_tokenizer(tokenizer_files(model_folder), kept)


def tokenizer_of(config: Config, data: RunData) -> KnownTokenizer:
    """The kept one, else the one that the data was prepared with."""
    kept = _kept(config)
    if not kept.is_dir() or not any(kept.iterdir()):
        return KnownTokenizer(data.tokenizer, data.tokenizer_sha256)
    path = kept / "tokenizer.json"
    return KnownTokenizer(str(kept.resolve()), digest(path).sha256 if path.is_file() else None)


def _kept(config: Config) -> Path:
    return config.run_dir / "model_tokenizer"
