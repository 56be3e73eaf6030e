"""Opens a stored model: a Hugging Face folder, hub id, one of our checkpoints, or the folder of a run.

In: a path. Out: its shape, a reader of its weights, its tokenizer, and the tokens that end a text. No weights are read
here, so a command can check the model before it starts ranks, and each rank opens it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_pipeline.storage.meta import read_meta
from data_pipeline.tokenizers.reading import HubTokenizer
from launch.conversion.huggingface.checkpoint_tokenizer import REMEDY, changed_since, find_tokenizer, given_tokenizer
from launch.conversion.huggingface.folder_lookup import ENDS_OF_TURNS, fetched_folder, model_of
from launch.conversion.huggingface.model_folder import ModelFolder, open_model_folder
from launch.errors import LaunchError
from launch.trainer.start.resume import IMPORTED, check_tokenizer
from megalite.checkpoint.huggingface.json_files import CONFIG, refuse_adapter
from megalite.checkpoint.huggingface.tokenizer_folder import tokenizer_files
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.merged_reader import MergedReader
from megalite.checkpoint.reader import WeightReader, open_checkpoint
from megalite.config import ModelConfig


@dataclass(frozen=True)
class StoredModel:
    """Everything about a stored model except its weights."""

    folder: Path
    model: ModelConfig
    weights: WeightReader
    carried: Mapping[str, Any]  # Hugging Face's config, generation_config, dtype; empty for a run from scratch
    run: Mapping[str, Any]  # config of the run that saved it; empty if it was not saved by a run
    tokenizer: Path | None  # its folder
    tokenizer_problem: str = ""  # why there is none, a clause
    hub: ModelFolder | None = None
    manifest: Manifest | None = None  # if it is one of our checkpoints

    @property
    def dtype(self) -> str:
        """The dtype of a folder's weights or of a run's computation: fp32, bf16 or fp16."""
        return str(self.carried.get("dtype") or self.run.get("precision", {}).get("dtype", "fp32"))

    @cached_property
    def loaded_tokenizer(self) -> HubTokenizer:
        """The tokenizer, loaded once: its process takes seconds. Raises LaunchError if there is none, or DataError."""
        if self.tokenizer is None:
            raise LaunchError(f"{self.folder}: text needs a tokenizer, but {self.tokenizer_problem}: {REMEDY}")
        return HubTokenizer(self.tokenizer)

    def end_tokens(self, tokenizer: HubTokenizer) -> frozenset[int]:
        """Returns the tokens that end a text: from generation_config.json, else config.json, else the tokenizer; and
        those by which answers end that a run was trained on.

        Unlike here, transformers does not stop if generation_config.json exists and names none."""
        turns = {end for end in self.run.get(ENDS_OF_TURNS) or [] if isinstance(end, int)}
        for name in ("generation_config", "config"):
            ids = (self.carried.get(name) or {}).get("eos_token_id")
            if ids is not None:
                return frozenset(turns | set([ids] if isinstance(ids, int) else ids))
        return frozenset(turns if tokenizer.eos_token_id is None else {*turns, tokenizer.eos_token_id})

    def check_prepared(self, prefix: Path) -> None:
        """Raises LaunchError if data was prepared with another tokenizer: its ids would mean other text."""
        meta = read_meta(prefix)
        if meta is None:
            return
        if self.tokenizer is not None:
            changed_since(self.tokenizer, prefix, meta.tokenizer_sha256, all_files=meta.tokenizer_files)
        if self.hub is not None:
            self.hub.check_tokenizer(prefix, meta.tokenizer, meta.tokenizer_sha256)
        elif self.manifest is not None:
            check_tokenizer(self.manifest, self.folder, prefix, meta.tokenizer, meta.tokenizer_sha256)

    def check_ids(self, ids: Sequence[int], source: str) -> None:
        """Raises LaunchError if the model has no embedding for a token that its tokenizer makes of `source`."""
        if max(ids, default=0) >= self.model.vocab_size:
            raise LaunchError(
                f"{self.folder}: its tokenizer makes token {max(ids)} of {source}, but its model knows only "
                f"{self.model.vocab_size}: it is another model's tokenizer"
            )


def open_stored(path: str | Path, tokenizer: str | Path | None = None) -> StoredModel:
    """Opens a model, with the tokenizer in the folder `tokenizer` instead of the one that the model knows.

    Raises CheckpointError, FamilyError or LaunchError if there is no model that we support, or if the tokenizer given
    is not the model's.
    """
    folder = fetched_folder(path)
    if (folder / CONFIG).is_file():
        hub = open_model_folder(folder)
        own = hub.folder if tokenizer_files(hub.folder) else None
        place = own if tokenizer is None else given_tokenizer(Path(tokenizer), hub.tokenizer_sha256, hub.folder)
        return StoredModel(hub.folder, hub.model, hub.reader, hub.carried(), {}, place, "the folder has none", hub=hub)
    refuse_adapter(folder)
    reader = open_checkpoint(folder, MergedReader)
    config = reader.manifest.config
    found = find_tokenizer(reader.manifest, reader.folder, tokenizer)
    return StoredModel(
        reader.folder,
        model_of(config.get("model"), str(reader.folder)),
        reader,
        config.get(IMPORTED) or {},
        config if "training" in config else {},
        found.folder,
        found.problem,
        manifest=reader.manifest,
    )
