"""Checkpoints of small engines, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.saver import Saved, Saver
from megalite.engine.engine import Engine


def save(
    engine: Engine, root: Path, step: int, *, background: bool = False, config: dict[str, Any] | None = None
) -> Saved:
    """Saves and waits; collective."""
    saver = Saver(engine, root, background=background)
    saver.save(Manifest(step=step, config=config or {}, tokenizer=None, state={}, tensors={}, files={}))
    saver.wait()
    (saved,) = saver.finished()
    return saved
