"""Checkpoints of small engines, for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megalite.checkpoint.manifest import MANIFEST, Manifest
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


def forge(folder: Path, old: str, new: str) -> None:
    """Replaces text in a manifest, which then has no digest any more: a flipped bit is told by it, a forger is not."""
    path = folder / MANIFEST
    text = path.read_text()
    assert old in text
    path.write_text(re.sub(r'"digest": ?"\w*"', '"digest": ""', text.replace(old, new)))


class SilentLog:
    """What a loop tells of itself, where sentences, events and files are looked at elsewhere."""

    def log_notice(self, sentence: str) -> None:
        pass

    def event(self, name: str, **facts: Any) -> None:
        pass

    def sync(self) -> None:
        pass

    log_warning = log_notice
