"""A smaller copy of a Hugging Face folder: its first layers, at full width, with embedding, last norm and head.

For models that are too large to be loaded whole. Nothing but the number of layers changes, and every kind of layer the
model has is among those that stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from launch.convert.model_folder import open_model_folder
from launch.convert.serial import global_shapes
from launch.hub_folder import model_of
from megalite.checkpoint.files import remove
from megalite.checkpoint.hub_json import CONFIG
from megalite.checkpoint.hugging_face import row_blocks, write_configs, write_weights
from megalite.checkpoint.safetensors_file import Entry
from megalite.config import ModelConfig
from models.families import family, model_config

LEAST_LAYERS = 2


@dataclass(frozen=True)
class FirstLayers:
    """How many layers stay."""

    count: int

    @classmethod
    def of(cls, model: ModelConfig) -> FirstLayers:
        """The fewest that have every kind of layer of `model` among them."""
        kinds = [_kind(model, layer) for layer in range(model.num_hidden_layers)]
        last_new = max(kinds.index(kind) for kind in set(kinds))
        return cls(min(model.num_hidden_layers, max(LEAST_LAYERS, last_new + 1)))

    @contextmanager
    def copied(self, hf_dir: Path, scratch: Path) -> Iterator[tuple[ModelConfig, Path]]:
        """The smaller model, and a folder of it in `scratch`, removed when the block ends. Raises CheckpointError."""
        folder = scratch / "first_layers"
        folder.mkdir()
        try:
            yield self._copy(hf_dir, folder), folder
        finally:
            remove(folder)

    def _copy(self, hf_dir: Path, folder: Path) -> ModelConfig:
        files = open_model_folder(hf_dir).files
        config = self._shortened(files.config)
        model = model_of(model_config(config), str(hf_dir / CONFIG))
        layout = family(model.model_type).layout(model, global_shapes(model))
        entries = [Entry(tensor.name, tensor.shape, files.dtype(tensor.name)) for tensor in layout.tensors.values()]

        def blocks(entry: Entry) -> Iterator[Tensor]:
            return (files.read(entry.key, block) for block in row_blocks(entry.shape, entry.dtype.itemsize))

        write_configs(folder, config, {})
        write_weights(folder, entries, blocks)
        return model

    def _shortened(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The same config.json with fewer layers, and with fewer entries where it lists them."""
        key = family(config.get("model_type")).all_keys["num_hidden_layers"]
        layers = config[key]

        def shortened(value: Any) -> Any:
            return value[: self.count] if isinstance(value, list) and len(value) == layers else value

        return {name: shortened(value) for name, value in config.items()} | {key: self.count}


def _kind(model: ModelConfig, layer: int) -> tuple[bool, bool, int]:
    return model.has_window(layer), model.has_experts(layer), model.rotary_dim(layer)
