"""A small checkpoint of two ranks to be damaged, what reads all of it, and forging what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import MANIFEST, Manifest, entry
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.writer import Block, commit, start, write_blocks

NUMBERS = {
    ("weight", "layers.0.mlp.weight"): torch.randn(6, 4, generator=torch.Generator().manual_seed(1)),
    ("weight", "norm.weight"): torch.arange(3.0),
    ("exp_avg", "layers.0.mlp.weight"): torch.randn(6, 4, generator=torch.Generator().manual_seed(2)),
    ("exp_avg", "norm.weight"): torch.arange(3.0) / 7,
}
FIRST, SECOND = "rank_00000_000.safetensors", "rank_00001_000.safetensors"
FILES = (MANIFEST, FIRST, SECOND)


def write(folder: Path, step: int = 1, numbers: dict[tuple[str, str], Tensor] = NUMBERS) -> Path:
    """A checkpoint of two ranks, each with half of every matrix."""
    temporary = start(folder)
    cuts = [(slice(0, 3), slice(0, 1)), (slice(3, 6), slice(1, 3))]  # rows of the matrix and of the vector
    files = {}
    for rank, (of_matrix, of_vector) in enumerate(cuts):
        blocks = []
        for (kind, name), whole in numbers.items():
            rows = of_matrix if whole.dim() == 2 else of_vector
            source = (rows, *(slice(0, n) for n in whole.shape[1:]))
            blocks.append(Block(entry(kind, name, source), whole[source].contiguous()))
        files |= write_blocks(temporary, f"rank_{rank:05d}", blocks)
    manifest = Manifest(
        step=step,
        config={"model": {"hidden_size": 4}},
        tokenizer=None,
        state={"consumed_samples": 80},
        moments=("exp_avg",),
        tensors={name: tuple(whole.shape) for (_, name), whole in numbers.items()},
        files=files,
    )
    commit(folder, manifest)
    return folder


def read_all(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Everything a resume would read. CheckpointError is the only way to fail, and is one line about this folder."""
    try:
        reader = CheckpointReader(folder)
        kinds = ("weight", *reader.manifest.moments)
        return {(kind, name): reader.read(name, kind=kind) for kind in kinds for name in reader.manifest.tensors}
    except CheckpointError as error:
        sentence = str(error)
        assert sentence.isprintable() and len(sentence) < 1000, repr(sentence)
        assert str(folder) in sentence
        raise


def is_refused(folder: Path) -> bool:
    try:
        read_all(folder)
    except CheckpointError:
        return True
    return False


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest as one who wants to be believed."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    manifest.pop("digest", None)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def put(folder: Path, name: str, data: bytes) -> None:
    """Replaces a file, and what the manifest says of it."""
    (folder / name).write_bytes(data)
    facts = {"size": len(data), "sha256": sha256(data).hexdigest()}
    forge(folder, lambda m: m["files"].update({name: facts}))
