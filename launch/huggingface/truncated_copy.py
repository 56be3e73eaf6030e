"""A smaller copy of a Hugging Face folder: its first layers, at full width, with embedding, last norm and head.

Models that do not fit into memory are compared by such a copy. Only the number of layers changes, and every kind of
layer of the model is among the remaining ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from launch.huggingface.hub_folder import model_of
from launch.huggingface.model_folder import open_model_folder
from launch.huggingface.serial_model import global_shapes
from megalite.checkpoint.durable_files import remove
from megalite.checkpoint.huggingface.folder import row_blocks, write_configs, write_weights
from megalite.checkpoint.huggingface.json_files import CONFIG
from megalite.checkpoint.huggingface.safetensors_writer import Entry
from megalite.config import ModelConfig
from models.families import family, model_config

LEAST_LAYERS = 2


def layers_of_every_kind(model: ModelConfig) -> int:
    """Returns the smallest number of first layers that contains every kind of layer of `model`, at least two."""
    layers = range(model.num_hidden_layers)
    kinds = [(model.has_window(layer), model.has_experts(layer), model.rotary_dim(layer)) for layer in layers]
    last_new = max(kinds.index(kind) for kind in set(kinds))
    return min(model.num_hidden_layers, max(LEAST_LAYERS, last_new + 1))


@contextmanager
def truncated_copy(hf_dir: Path, layers: int, scratch: Path) -> Iterator[tuple[ModelConfig, Path]]:
    """Yields the model of the first `layers` and a folder of it in `scratch`, removed at the end. Raises
    CheckpointError."""
    folder = scratch / "first_layers"
    folder.mkdir()
    try:
        yield _write_copy(hf_dir, layers, folder), folder
    finally:
        remove(folder)


def _write_copy(hf_dir: Path, layers: int, folder: Path) -> ModelConfig:
    files = open_model_folder(hf_dir).files
    config = _shortened(files.config, layers)
    model = model_of(model_config(config), str(hf_dir / CONFIG))
    layout = family(model.model_type).layout(model, global_shapes(model))
    entries = [Entry(tensor.name, tensor.shape, files.dtype(tensor.name)) for tensor in layout.tensors.values()]

    def blocks(entry: Entry) -> Iterator[Tensor]:
        return (files.read(entry.key, block) for block in row_blocks(entry.shape, entry.dtype.itemsize))

    write_configs(folder, config, {})
    write_weights(folder, entries, blocks)
    return model


def _shortened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns a config.json with fewer layers; lists with one entry per layer are shortened too."""
    key = family(config.get("model_type")).all_keys["num_hidden_layers"]
    return {
        name: value[:layers] if isinstance(value, list) and len(value) == config[key] else value
        for name, value in config.items()
    } | {key: layers}
