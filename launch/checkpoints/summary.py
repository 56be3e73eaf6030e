"""Summarises manifests as plain values, for people and for `--json`: layout, age, contents, main options. No torch.

A manifest may come from anywhere: entries that are not as our runs write them are left out, never an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from math import prod
from typing import Any

from megalite.checkpoint.manifest import Manifest, printable
from megalite.checkpoint.remote.storage import Listed

HOLDS = ("weights only", "full")  # weights to start from; all that a run needs to go on
LAYOUT = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
    "zero_stage": "zero",
}
UNSAID = (("cp", 1), ("ep", 1))
MAIN_OPTIONS = {
    "model": (
        *("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "tie_word_embeddings"),
    ),
    "training": ("global_batch_size", "sequence_length", "steps", "tokens", "seed"),
    "optimizer": ("name", "learning_rate"),
    "precision": ("dtype",),
}


def summarize_folder(listed: Listed, latest: str | None, now: datetime) -> dict[str, Any]:
    """Returns the facts about one checkpoint folder, complete or not, as `ls --json` prints them.

    `latest` is the name in the pointer of that name, `now` timezone-aware. Facts from the manifest are None where
    the checkpoint is not complete.
    """
    manifest = listed.manifest
    return {
        "name": listed.name,
        "url": listed.url,
        "is_latest": listed.name == latest,
        "problem": listed.problem,  # a sentence; None: complete
        "step": listed.step,
        "size": listed.bytes,  # on disk
        "age_s": age_seconds(manifest, now) if manifest else None,
        "layout": layout_text(manifest) if manifest else None,
        "evaluation_loss": manifest.evaluation_loss if manifest else None,
        "holds": HOLDS[bool(manifest.state)] if manifest else None,
    }


def summarize_checkpoint(manifest: Manifest) -> dict[str, Any]:
    """Returns the main facts about a complete checkpoint, as `show --json` prints them."""
    return {
        "step": manifest.step,
        "written": manifest.written,  # ISO 8601 with offset; empty where unknown
        "layout": layout_text(manifest),
        "holds": HOLDS[bool(manifest.state)],
        "evaluation_loss": manifest.evaluation_loss,
        "tensors": len(manifest.tensors),
        "parameters": sum(map(prod, manifest.tensors.values())),  # tied ones count once
        "moments": manifest.moments,
        "optimizer_steps": manifest.optimizer_steps,
        "state": manifest.state,
        "loss_scaler": manifest.loss_scaler,
        "tokenizer": manifest.tokenizer,
        "config": {
            f"{section}.{option}": values[option]
            for section, options in MAIN_OPTIONS.items()
            for option in options
            if isinstance(values := manifest.config.get(section), dict) and values.get(option) is not None
        },
        "size": sum(file.size for file in manifest.files.values()),
        "files": {name: file.size for name, file in manifest.files.items()},
    }


def layout_text(manifest: Manifest) -> str:
    """Returns the layout that wrote a checkpoint, such as `tp2 pp2 dp2 zero1 bf16`; any layout can read it."""
    precision = manifest.config.get("precision")
    return sizes_text(manifest.layout, precision.get("dtype") if isinstance(precision, dict) else None)


def sizes_text(layout: Mapping[str, Any], dtype: str | None) -> str:
    """Returns the sizes of a layout, by the names that manifests and receipts have, with the number format."""
    sizes = [
        f"{short}{layout[name]}"
        for name, short in LAYOUT.items()
        if name in layout and (short, layout[name]) not in UNSAID
    ]
    return printable(" ".join([*(sizes or ["one process"]), *([str(dtype)] if dtype else [])]))


def age_seconds(manifest: Manifest, now: datetime) -> float | None:
    """Returns the seconds since it was written, negative if a clock was set back; None where unknown."""
    try:
        written = datetime.fromisoformat(manifest.written)
    except ValueError:
        return None
    return (now - written).total_seconds() if written.tzinfo else None
