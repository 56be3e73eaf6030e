"""Reads the JSON files of a Hugging Face folder, without torch."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import find_latest, printable

CONFIG = "config.json"
LARGEST = 1 << 26  # bytes; the index of a model with 100,000 tensors has 10 MB
ADAPTER = "adapter_config.json"  # as peft writes it


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises CheckpointError if it holds none, or is too large for one."""
    try:
        if not stat.S_ISREG((about := path.stat()).st_mode):  # of a pipe nothing might ever come
            raise CheckpointError(f"{path}: is no file")
        if about.st_size > LARGEST:
            raise CheckpointError(f"{path}: {about.st_size:,} bytes are too many for it")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {_what_is_there(path)}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {printable(str(error))}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def refuse_adapter(folder: Path) -> None:
    """Raises CheckpointError for a folder of adapters without their model, as peft and `megalite export` write it."""
    if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: {_what_is_there(folder / CONFIG)}")


def _what_is_there(missing: Path) -> str:
    """Returns a clause that says what the folder of a missing file is, and what to do."""
    folder = missing.parent
    if missing.name == CONFIG and (folder / ADAPTER).is_file():
        return (
            "is an adapter, not a model: merge it into its base model first, with peft's merge_and_unload, or with "
            "`megalite export --merge` of the run that trained it"
        )
    if missing.name == CONFIG and find_latest(folder)[0] is not None:
        return (
            "is a run or checkpoint of megalite, no Hugging Face folder: `megalite export` makes one of it, and "
            "training.initialize_from takes it as it is"
        )
    return f"not a Hugging Face folder: it has no {missing.name}"
