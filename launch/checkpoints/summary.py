"""Summarises a manifest: layout, age, contents, the main options of its config. No torch.

A manifest may come from anywhere: entries that are not as our runs write them are left out, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from math import prod
from typing import Any

from megalite.checkpoint.manifest import Manifest, printable

LAYOUT = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "zero_stage": "zero",
}
MAIN_OPTIONS = {
    "model": (
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "tie_word_embeddings",
    ),
    "training": ("global_batch_size", "sequence_length", "steps", "tokens", "seed"),
    "optimizer": ("name", "learning_rate"),
    "precision": ("dtype",),
}
FULL, WEIGHTS_ONLY = "full", "weights only"
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True)
class CheckpointSummary:
    """The main facts about one complete checkpoint."""

    step: int
    written: str  # ISO 8601 with offset; empty where unknown
    layout: str
    holds: str  # FULL, or WEIGHTS_ONLY
    evaluation_loss: float | None
    tensors: int
    parameters: int  # number of weights; tied ones count once
    moments: tuple[str, ...]
    optimizer_steps: int
    state: dict[str, Any]  # position in the data and other counters of the run
    loss_scaler: dict[str, float]
    tokenizer: str | None
    config: dict[str, Any]  # main options by dotted name
    size: int  # bytes of the files
    files: dict[str, int]  # name -> bytes


def summarize_checkpoint(manifest: Manifest) -> CheckpointSummary:
    """Summarises a manifest."""
    return CheckpointSummary(
        step=manifest.step,
        written=manifest.written,
        layout=layout_text(manifest),
        holds=holds(manifest),
        evaluation_loss=manifest.evaluation_loss,
        tensors=len(manifest.tensors),
        parameters=sum(map(prod, manifest.tensors.values())),
        moments=manifest.moments,
        optimizer_steps=manifest.optimizer_steps,
        state=manifest.state,
        loss_scaler=manifest.loss_scaler,
        tokenizer=manifest.tokenizer,
        config=dict(_main_options(manifest.config)),
        size=size_of(manifest),
        files={name: file.size for name, file in manifest.files.items()},
    )


def layout_text(manifest: Manifest) -> str:
    """The layout that wrote a checkpoint, such as `tp2 pp2 dp2 zero1 bf16`; any layout can read it."""
    sizes = [f"{short}{manifest.layout[name]}" for name, short in LAYOUT.items() if name in manifest.layout]
    precision = manifest.config.get("precision")
    dtype = precision.get("dtype") if isinstance(precision, dict) else None
    return printable(" ".join([*(sizes or ["one process"]), *([str(dtype)] if dtype else [])]))


def holds(manifest: Manifest) -> str:
    """FULL if a run can resume from it; WEIGHTS_ONLY if it holds only weights to start from."""
    return FULL if manifest.state else WEIGHTS_ONLY


def size_of(manifest: Manifest) -> int:
    """Total bytes of its files."""
    return sum(file.size for file in manifest.files.values())


def age_seconds(manifest: Manifest, now: datetime) -> float | None:
    """Seconds since it was written, negative if a clock was set back; None where unknown. `now` is timezone-aware."""
    try:
        written = datetime.fromisoformat(manifest.written)
    except ValueError:
        return None
    return (now - written).total_seconds() if written.tzinfo else None


def age_text(seconds: float | None) -> str:
    """An age with its unit, such as `3 h`; empty where unknown."""
    if seconds is None:
        return ""
    if seconds < 0:
        return "in the future"
    size, unit = next((u for u in UNITS if seconds >= u[0]), UNITS[-1])
    return f"{int(seconds // size)} {unit}"


def _main_options(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, options in MAIN_OPTIONS.items():
        values = config.get(section)
        for option in options:
            if isinstance(values, dict) and values.get(option) is not None:
                yield f"{section}.{option}", values[option]
