"""Reads a Hugging Face folder as one of our models: checks its config and tensors, and reads our weights from them.

In: a path or hub id. Out: a `ModelFolder`, from which any block of any of our weights can be read: imports convert it,
runs start from it without a conversion. Every defect of the folder is found here, from config.json and the headers of
its files, before weights are read. Nothing is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.conversion.huggingface.checkpoint_tokenizer import has_sha256, is_same_tokenizer, tokenizer_sha256
from launch.conversion.huggingface.folder_lookup import fetched_folder, model_of_config
from launch.conversion.huggingface.serial_model import global_shapes
from launch.errors import LaunchError
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.folder import HuggingFaceFolder
from megalite.checkpoint.huggingface.hub_reader import HubReader
from megalite.checkpoint.huggingface.json_files import CONFIG
from megalite.checkpoint.huggingface.tokenizer_folder import TOKENIZER, tokenizer_files
from megalite.checkpoint.manifest import Slices
from megalite.config import ModelConfig
from models.families import family
from models.hub.family import TRANSFORMERS_DTYPES
from models.hub.tensor_layout import HubLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder whose tensors are all known."""

    files: HuggingFaceFolder
    model: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]  # our weights, by canonical name
    layout: HubLayout

    @property
    def folder(self) -> Path:
        return self.files.folder

    @cached_property
    def reader(self) -> HubReader:
        """Reads our weights for an engine."""
        return HubReader(self.folder, self.files.read, self.layout, self.shapes)

    @cached_property
    def tokenizer_sha256(self) -> str | None:
        """The hash by which its tokenizer is known; None if it has no tokenizer.json."""
        return tokenizer_sha256(tokenizer_files(self.folder))

    @property
    def fingerprint(self) -> str:
        """A hash of the model's options and the sizes of the files, which must be equal on all hosts."""
        sizes = {name: (self.folder / name).stat().st_size for name in self.files.files}
        identity = json.dumps([self.model.model_dump(mode="json"), sizes], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()

    def read(self, name: str, source: Slices) -> Tensor:
        """Returns a block of our weight `name`, in the dtype it is stored in."""
        return self.layout.read_own(self.files.read, name, source)

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor by its hub name: fp32, bf16 or fp16."""
        return {name: NAMES[self.files.dtype(name)] for name in self.layout.tensors}

    @property
    def dtype(self) -> str:
        """The dtype of the folder: if tensors differ that in config.json, else that of most elements."""
        sizes: dict[str, int] = {}
        for name, dtype in self.dtypes.items():
            sizes[dtype] = sizes.get(dtype, 0) + torch.Size(self.layout.tensors[name].shape).numel()
        stated = self.files.config.get("dtype") or self.files.config.get("torch_dtype")
        dtype = next((name for name, theirs in TRANSFORMERS_DTYPES.items() if theirs == stated), "")
        return dtype if dtype in sizes else max(sizes, key=lambda dtype: sizes[dtype])

    def carried(self, dtype: str | None = None) -> dict[str, Any]:
        """Returns the data that a checkpoint keeps under `hugging_face` for exports in `dtype` (default: as stored)."""
        usual = dtype or self.dtype
        kept: dict[str, Any] = {
            "config": family(self.model.model_type).carried(self.files.config),
            "generation_config": self.files.generation_config,
            "dtype": usual,
        }
        others = {} if dtype else {name: stored for name, stored in self.dtypes.items() if stored != usual}
        return kept | {"dtypes": others} if others else kept

    def check_tokenizer(self, data: Path | str, prepared_with: str | None, sha256: str | None) -> None:
        """Raises LaunchError if `data` was prepared with another tokenizer: its ids would mean other text here."""
        files = tokenizer_files(self.folder)
        if sha256 is None or not (self.folder / TOKENIZER).is_file() or has_sha256(files, sha256):
            return
        if prepared_with is not None and is_same_tokenizer(Path(prepared_with), sha256, self.folder / TOKENIZER):
            return
        raise LaunchError(
            f"{data} was prepared with another tokenizer ({prepared_with}) than that of {self.folder}, so its ids mean "
            f"other text to this model: prepare it again with --tokenizer {self.folder}, or, if the model is meant to "
            "learn those ids, put that tokenizer's files into the model's folder"
        )


def open_model_folder(place: str | Path) -> ModelFolder:
    """Opens a folder or hub id. Raises CheckpointError, FamilyError or LaunchError if it is missing or unsupported."""
    folder = fetched_folder(place)
    files = HuggingFaceFolder(folder)
    _check_counts(files)
    model = model_of_config(files.config, folder)
    described = family(model.model_type)
    try:
        shapes = global_shapes(model)
    except (RuntimeError, TypeError):  # sizes overflow torch's 64 bits
        raise CheckpointError(f"{folder / CONFIG}: asks for more numbers than any model has") from None
    layout = described.layout(model, shapes)
    wanted = {name: tensor.shape for name, tensor in layout.tensors.items()}
    files.add_prefix(described.base_prefix, wanted)
    embedding = layout.hub_names(EMBEDDING)[0]
    if left_out := sum(described.is_left_out(name, model) for name in files.shapes):
        files.notices += (
            f"{left_out} tensors of layers behind the last one, for multi-token prediction, are left out: neither "
            "training nor an export has them",
        )
    files.check_tensors(
        wanted,
        copies={described.head: embedding} if model.tie_word_embeddings else {},
        ignored=lambda name: name.endswith(described.ignored) or described.is_left_out(name, model),
    )
    return ModelFolder(files, model, shapes, layout)


def _check_counts(files: HuggingFaceFolder) -> None:
    """Raises CheckpointError if config.json asks for more layers or experts than there are tensors, before any is
    built: each has at least one tensor of its own."""
    keys = family(files.config.get("model_type")).all_keys
    for option in ("num_hidden_layers", "num_experts"):
        asked = files.config.get(keys.get(option, option))
        if isinstance(asked, int) and asked > len(files.shapes):
            raise CheckpointError(
                f"{files.folder}: holds {len(files.shapes)} tensors, but its config.json has "
                f"{keys.get(option, option)} {asked}"
            )
