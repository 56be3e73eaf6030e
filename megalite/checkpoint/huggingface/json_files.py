"""Reads the JSON files of a Hugging Face folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import printable

CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises CheckpointError if it holds none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: not a Hugging Face folder: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {printable(str(error))}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
