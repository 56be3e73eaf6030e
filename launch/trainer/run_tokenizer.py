"""Keeps the tokenizer of a run in its folder, so that its checkpoints can be used wherever the folder is.

It is that of the weights the run starts from, chat templates included, or else the one that prepared its data. It is
chosen before ranks start and copied by rank 0 before the first step.
"""

from __future__ import annotations

import json
from pathlib import Path

from launch.conversion.huggingface.checkpoint_tokenizer import KEPT, RECORDED, has_sha256, tokenizer_sha256
from launch.trainer.data.opening import RunData
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.json_files import CONFIG, read_json
from megalite.checkpoint.huggingface.tokenizer_folder import (
    TOKENIZER,
    check_tokenizer_links,
    copy_tokenizer,
    tokenizer_files,
)
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config

_CLASS_KEYS = ("model_type", "tokenizer_class")  # of config.json, from which transformers takes a tokenizer's class


def check_kept(manifest: Manifest, checkpoint: Path, config: Config) -> None:
    """Raises CheckpointError if the run's folder holds another tokenizer than its checkpoint was trained with."""
    kept, wanted = config.run_dir / KEPT, manifest.tokenizer_sha256
    files = tokenizer_files(kept)
    if wanted is not None and (kept / TOKENIZER).is_file() and not has_sha256(files, wanted):
        raise CheckpointError(
            f"{kept / TOKENIZER} is not the tokenizer that {checkpoint} was trained with, whose SHA-256 is {wanted}: "
            "give that one back, or move the folder away"
        )


def choose_tokenizer(config: Config, data: RunData, first: Path | None, wanted: str | None) -> tuple[Path | None, str]:
    """Returns the folder of the run's tokenizer, or None and a notice of why it keeps none.

    `first` is taken if it has a tokenizer; else the one that prepared the data, else one that an earlier start has
    kept, if their tokenizer.json has the SHA-256 `wanted`.
    """
    prepared_with = [Path(data.tokenizer)] if data.tokenizer else []
    known = [place for place in (*prepared_with, config.run_dir / KEPT) if has_sha256(tokenizer_files(place), wanted)]
    problem = f"the tokenizer of {config.data.prefixes[0]} is no longer in {data.tokenizer}"
    for place in (*([first] if first else []), *known):
        if files := tokenizer_files(place):
            try:
                check_tokenizer_links(files)  # they are copied when ranks have started
                return files[0].parent, ""
            except CheckpointError as error:
                problem = str(error)
    if data.tokenizer is None:
        return None, ""
    return None, f"the run keeps no tokenizer, {problem}: generate and export will need --tokenizer"


def check_room_for(config: Config, source: Path) -> None:
    """Raises CheckpointError if the run's folder holds other files where `keep_tokenizer` is to copy `source`."""
    kept = config.run_dir / KEPT
    if kept.exists() and not _is_kept(source, kept) and (not kept.is_dir() or any(kept.iterdir())):
        raise CheckpointError(
            f"{kept} holds other files than the tokenizer {source}, which the run is to keep there: move them away, or "
            "choose another run_dir"
        )


def keep_tokenizer(config: Config, source: Path) -> None:
    """Copies the tokenizer in the folder `source` into the run's folder, whole or not at all; no change if it is there.

    Raises CheckpointError if it cannot be written, or if other files are there.
    """
    from megalite.checkpoint.atomic_folder import new_folder  # pulls in torch

    kept = config.run_dir / KEPT
    if _is_kept(source, kept):
        return
    with new_folder(kept, overwrite=False, marker=TOKENIZER) as folder:
        copy_tokenizer(tokenizer_files(source), folder)
        if (source / CONFIG).is_file():
            named = {key: value for key, value in read_json(source / CONFIG).items() if key in _CLASS_KEYS}
            (folder / CONFIG).write_text(json.dumps(named) + "\n", encoding="utf-8")


def tokenizer_in_manifests(data: RunData, kept: Path | None) -> tuple[str | None, str | None]:
    """Returns the run's tokenizer as the manifests of its checkpoints record it: its folder and its digest.

    `kept`: the folder that the run keeps a copy of; without one, it is the folder of the tokenizer of the data.
    """
    if kept is None:
        return data.tokenizer, data.tokenizer_sha256
    files = tokenizer_files(kept)
    return RECORDED, data.tokenizer_sha256 if has_sha256(files, data.tokenizer_sha256) else tokenizer_sha256(files)


def _is_kept(source: Path, kept: Path) -> bool:
    """Returns whether `kept` holds every file of the tokenizer in `source`; the user may have added others."""
    copies = [(path, kept / path.relative_to(source)) for path in tokenizer_files(source)]
    return all(copy.is_file() and copy.read_bytes() == path.read_bytes() for path, copy in copies)
