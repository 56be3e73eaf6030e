"""`megalite export` of a run that trained adapters: a folder that peft loads on top of the model of that run.

peft names a module as transformers does. So only projections that are a whole tensor of a Hugging Face folder have a
place in such a folder; those that are fused there with others, or transposed, can be merged into the model instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from launch.conversion.huggingface.folder_lookup import BASE_MODEL
from launch.conversion.huggingface.model_folder import DTYPES
from launch.conversion.huggingface.progress import ConversionPlan, ConvertSummary, ReportProgress
from launch.conversion.huggingface.streaming import Stream, convert
from launch.conversion.huggingface.validation import Validation
from megalite.checkpoint.atomic_folder import check_room, new_folder
from megalite.checkpoint.durable_files import room_at
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.folder import GENERATION_CONFIG
from megalite.checkpoint.huggingface.json_files import ADAPTER
from megalite.checkpoint.huggingface.safetensors_writer import Entry, write_safetensors
from megalite.checkpoint.huggingface.tokenizer_folder import copy_tokenizer
from megalite.checkpoint.merged_reader import MergedReader
from models.hub.tensor_layout import HubLayout

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of modules in a PEFT folder


@dataclass(frozen=True)
class AdapterExport:
    """A checked checkpoint whose adapters are to be written."""

    reader: MergedReader
    model_type: str
    layout: HubLayout
    dtype: str
    tokenizer: list[Path]
    notices: tuple[str, ...]
    ends: int | list[int] | None = None  # eos_token_id of a model that ends by others than its base; None: as before

    @cached_property
    def modules(self) -> Mapping[str, tuple[str, str]]:
        """transformers' name of each module with an adapter, and ours of its two factors. Raises CheckpointError."""
        modules = {}
        for weight, factors in self.reader.factors.items():
            tensors = [self.layout.tensors[name] for name in self.layout.hub_names(weight)]
            if len(tensors) > 1 or len(tensors[0].runs) > 1 or tensors[0].transposed:
                raise CheckpointError(
                    f"{self.reader.folder}: the adapter of {weight} has no place in a PEFT folder, because a "
                    f"{self.model_type} model holds that weight in {tensors[0].name}, fused or transposed: give --merge"
                )
            modules[tensors[0].name.removesuffix(".weight")] = factors
        return modules

    @property
    def base(self) -> str | None:
        """The model that the adapters belong to, as the run noted it at its start: a hub id or a folder; None if it
        began with a checkpoint. Where `training.initialize_from` leads from here does not count."""
        noted = self.reader.manifest.config.get(BASE_MODEL)
        return noted if isinstance(noted, str) else None

    def config(self) -> dict[str, Any]:
        """Returns the adapter_config.json."""
        alpha = self.reader.adapter.alpha
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.reader.adapter.rank,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.modules}),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    def entries(self) -> dict[str, tuple[Entry, str]]:
        """Returns the tensors to write by their keys, each with the name of ours."""
        names = {
            f"{PREFIX}{module}.{factor.rpartition('.')[2]}.weight": factor
            for module, factors in self.modules.items()
            for factor in factors
        }
        shapes = self.reader.manifest.tensors
        return {key: (Entry(key, shapes[name], DTYPES[self.dtype]), name) for key, name in names.items()}


def plan_adapters(export: AdapterExport, folder: Path) -> ConversionPlan:
    """Describes what `export_adapters` would do."""
    entries = [entry for entry, _ in export.entries().values()]
    parameters = sum(prod(entry.shape) for entry in entries)
    base = (
        "the model that these adapters belong to is in no Hugging Face folder: name one in "
        f"{ADAPTER}, or export with --merge"
        if export.base is None
        else f"peft loads these adapters on top of {export.base}, which base_model_name_or_path in {ADAPTER} names"
    )
    notices = [*export.notices, base]
    if export.ends is not None:
        notices.append(
            f"what it writes ends at token {export.ends}, and peft stops where the base model's {GENERATION_CONFIG} "
            f"says: give generate eos_token_id={export.ends}, as the {GENERATION_CONFIG} here has it, or export with "
            "--merge"
        )
    return ConversionPlan(
        source=str(export.reader.folder),
        target=str(folder),
        model_type=f"LoRA adapters of a {export.model_type} model",
        tensors=len(entries),
        parameters=parameters,
        dtype=export.dtype,
        files=(WEIGHTS,),
        bytes_read=4 * parameters,
        bytes_written=sum(entry.size for entry in entries),
        bytes_free=room_at(folder.resolve()),
        notices=tuple(notices),
    )


def export_adapters(
    export: AdapterExport, folder: Path, *, overwrite: bool, validate: bool, report: ReportProgress
) -> ConvertSummary:
    """Writes the PEFT folder; with `validate` the digests of the checkpoint's files are compared.

    Raises CheckpointError or LaunchError.
    """
    plan, entries = plan_adapters(export, folder), export.entries()
    check_room(folder.resolve(), plan.bytes_written)
    with new_folder(folder, overwrite=overwrite, marker=ADAPTER) as written:
        text = json.dumps(export.config(), indent=2, sort_keys=True) + "\n"
        (written / ADAPTER).write_text(text, encoding="utf-8")
        if export.ends is not None:
            (written / GENERATION_CONFIG).write_text(json.dumps({"eos_token_id": export.ends}) + "\n", encoding="utf-8")
        copy_tokenizer(export.tokenizer, written)

        def write(stream: Stream) -> None:
            def blocks(entry: Entry) -> Iterator[Tensor]:
                return stream.blocks(export.reader.read, entries[entry.key][1], entry.shape, entry.dtype)

            write_safetensors(written / WEIGHTS, [entry for entry, _ in entries.values()], blocks, is_hashed=False)

        def compare() -> Validation:
            started = time.monotonic()
            export.reader.verify_weights(partial(report, "comparing digests"))
            return Validation(compared=("digests of the checkpoint's files",), seconds=time.monotonic() - started)

        what = f"{export.reader.folder}: in {export.dtype}"
        return convert(plan, write, compare if validate else None, what, report)
