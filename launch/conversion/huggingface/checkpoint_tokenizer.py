"""Finds the tokenizer of a checkpoint: a given one, the one where the manifest says, or the one that its run keeps.

A manifest has the digest of the tokenizer, or of all files of one without tokenizer.json, so only the tokenizer that
the model was trained with is taken, wherever it is found. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.reading import inspect_tokenizer, with_limits
from launch.errors import LaunchError
from megalite.checkpoint.durable_files import digest
from megalite.checkpoint.huggingface.tokenizer_folder import TOKENIZER, tokenizer_files
from megalite.checkpoint.manifest import Manifest

KEPT = "model_tokenizer"  # folder in the folder of a run
RECORDED = f"../../{KEPT}"  # the same in manifests of the run's checkpoints, relative to the checkpoint's folder
FILES_SHA256 = "tokenizer_files_sha256"  # under `hugging_face` in the manifest of an import without tokenizer.json
REMEDY = "give its folder with --tokenizer"


@dataclass(frozen=True)
class FoundTokenizer:
    """The folder of a checkpoint's tokenizer, or the reason why there is none."""

    folder: Path | None
    problem: str = ""  # a clause without a remedy
    is_doubtful: bool = False  # what is in its place may be another

    @property
    def files(self) -> list[Path]:
        """The files of the tokenizer with its chat templates."""
        return [] if self.folder is None else tokenizer_files(self.folder)


def find_tokenizer(manifest: Manifest, checkpoint: Path, given: str | Path | None = None) -> FoundTokenizer:
    """Finds the tokenizer of the checkpoint in the folder `checkpoint`.

    A relative path in a manifest starts at the checkpoint's folder, so that a run folder can be moved. A folder outside
    the run is taken only if the manifest has the digest of its tokenizer. Raises LaunchError if `given` is not the
    tokenizer that the manifest names by its digest.
    """
    if given is not None:
        return FoundTokenizer(given_tokenizer(Path(given), manifest.tokenizer_sha256, checkpoint))
    if manifest.tokenizer is None:
        return FoundTokenizer(None, "the checkpoint knows no tokenizer")
    doubtful = None
    for place in _places(manifest, checkpoint):
        files = tokenizer_files(place)
        problem = _doubt(manifest, checkpoint, files) if files else None
        if files and problem is None:
            return FoundTokenizer(files[0].parent)
        doubtful = doubtful or (problem and f"{place}: {problem}")
    if doubtful:
        return FoundTokenizer(None, doubtful, is_doubtful=True)
    return FoundTokenizer(None, f"its tokenizer is not in {_places(manifest, checkpoint)[0]}")


def _doubt(manifest: Manifest, checkpoint: Path, files: list[Path]) -> str | None:
    """Returns why a tokenizer's files may not be the checkpoint's; None if they are."""
    wanted, recorded = manifest.tokenizer_sha256, (manifest.config.get("hugging_face") or {}).get(FILES_SHA256)
    if wanted is not None:
        told = f"its {TOKENIZER} is not the one {checkpoint} was trained with, whose SHA-256 is {wanted}"
        return None if has_sha256(files, wanted) else f"{told}: it was retrained or replaced since"
    if _is_own(str(manifest.tokenizer)):
        return None
    if recorded is None:
        return f"it is outside the folder of {checkpoint}, whose manifest has no digest to know it by"
    return None if files_sha256(files) == recorded else f"its files were changed since {checkpoint} was imported"


def _places(manifest: Manifest, checkpoint: Path) -> list[Path]:
    """Returns the folders in which the tokenizer may be, the recorded one first.

    The run's own copy is looked for although a manifest of an older version names another place: a resume of the run
    has kept it. `checkpoints` may be a link to another disk: `..` is taken of the path, and of what the link leads to.
    """
    recorded = [manifest.tokenizer or RECORDED, *([RECORDED] if manifest.tokenizer_sha256 else [])]
    folders = (checkpoint.absolute(), checkpoint.resolve())
    return list(dict.fromkeys(Path(os.path.normpath(folder / path)) for path in recorded for folder in folders))


def _is_own(recorded: str) -> bool:
    """Returns whether a path in a manifest stays in its run: somebody else's could name any folder of this machine."""
    path = os.path.normpath(recorded)
    return path == RECORDED or not (Path(path).is_absolute() or Path(path).parts[:1] == (os.pardir,))


def given_tokenizer(given: Path, wanted: str | None, model: Path) -> Path:
    """Returns the folder of the tokenizer at `given`, its folder or its tokenizer.json.

    Raises LaunchError if there is none, or if it is not the one with the SHA-256 `wanted`, that of `model`.
    """
    files = tokenizer_files(given) if given.is_dir() or given.name == TOKENIZER else []
    if not files or (wanted is not None and _file_sha256(files) is None):
        raise LaunchError(f"--tokenizer {given}: there is no {TOKENIZER}: give a folder that has one")
    if wanted is not None and not has_sha256(files, wanted):
        raise LaunchError(
            f"--tokenizer {given} is another tokenizer than that of {model}: the SHA-256 of its {TOKENIZER} is "
            f"{tokenizer_sha256(files)}, and {wanted} is wanted: give the folder of that one"
        )
    return files[0].parent


def tokenizer_sha256(files: list[Path]) -> str | None:
    """Returns the SHA-256 by which data and checkpoints know a tokenizer; None if it has no tokenizer.json.

    It is that of tokenizer.json, unless transformers makes other ids of the files together.
    """
    path = next((path for path in files if path.name == TOKENIZER), None)
    try:
        return None if path is None else inspect_tokenizer(path).sha256
    except DataError:  # it cannot be used; what needs it says why
        return _file_sha256(files)


def has_sha256(files: list[Path], wanted: str | None) -> bool:
    """True if a tokenizer has this SHA-256; older versions recorded that of tokenizer.json for each."""
    return wanted is not None and (_file_sha256(files) == wanted or tokenizer_sha256(files) == wanted)


def changed_since(folder: Path, data: Path | str, sha256: str | None, *, all_files: bool) -> str:
    """Returns a notice of data that an older version prepared from the tokenizer.json of `folder` alone; "" if none.

    all_files: data with this SHA-256 was prepared with all files. Raises LaunchError if they make other ids now.
    """
    files = tokenizer_files(folder)
    if sha256 is None or _file_sha256(files) != sha256 or tokenizer_sha256(files) == sha256:
        return ""
    if all_files:
        raise LaunchError(
            f"{folder}: the files beside its {TOKENIZER} make other ids of a text than when {data} was prepared: give "
            "the former files back, or prepare the data again"
        )
    return (
        f"{data} was prepared from the {TOKENIZER} of {folder} alone, and the files beside it make other ids: "
        "prepare the data again, so that the model is trained on those that it will be asked with"
    )


def _file_sha256(files: list[Path]) -> str | None:
    return next((digest(path).sha256 for path in files if path.name == TOKENIZER), None)


def files_sha256(files: list[Path]) -> str:
    """Returns one SHA-256 of all files of a tokenizer: without a tokenizer.json only together are they one."""
    return hashlib.sha256(json.dumps([(path.name, digest(path).sha256) for path in files]).encode()).hexdigest()


def is_same_tokenizer(place: Path, sha256: str, other: Path) -> bool:
    """True if the tokenizer at `place` still has this hash and equals another one, formatting aside."""
    files = tokenizer_files(place)
    if not has_sha256(files, sha256):
        return False
    one, two = inspect_tokenizer(files[0]), inspect_tokenizer(other)
    return bool(with_limits(one, lambda: with_limits(two, lambda: one.load().to_str() == two.load().to_str())))
