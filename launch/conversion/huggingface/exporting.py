"""`megalite export`: converts a checkpoint of any layout to a Hugging Face folder.

No rank or launcher is involved, and the run that wrote the checkpoint may continue meanwhile. The folder appears under
its name only after transformers has computed our logits with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.chat.turns import answer_end, opening_notice
from data_pipeline.errors import DataError
from data_pipeline.tokenizers.folder_checks import TOKENIZER_CONFIG
from data_pipeline.tokenizers.reading import inspect_tokenizer
from launch.conversion.huggingface.adapter_exporting import AdapterExport, export_adapters, plan_adapters
from launch.conversion.huggingface.checkpoint_tokenizer import REMEDY, find_tokenizer
from launch.conversion.huggingface.folder_lookup import ENDS_OF_TURNS, model_of
from launch.conversion.huggingface.model_folder import DTYPES
from launch.conversion.huggingface.progress import ConversionPlan, ConvertSummary, ReportProgress, no_progress
from launch.conversion.huggingface.serial_model import global_shapes
from launch.conversion.huggingface.streaming import Stream, checkpoint_blocks, convert
from launch.conversion.huggingface.validation import Validation, validate_logits
from launch.errors import LaunchError
from megalite.checkpoint.atomic_folder import check_replaceable, check_room, existing_folder, new_folder
from megalite.checkpoint.durable_files import room_at
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.folder import SHARD_BYTES, shard_names, write_configs, write_weights
from megalite.checkpoint.huggingface.json_files import ADAPTER, CONFIG
from megalite.checkpoint.huggingface.safetensors_writer import Entry
from megalite.checkpoint.huggingface.tokenizer_folder import TOKENIZER, copy_tokenizer
from megalite.checkpoint.merged_reader import MergedReader
from megalite.checkpoint.reader import open_checkpoint
from megalite.config import ModelConfig
from megalite.parallel.expert_balance import BIAS
from models.families import family, hf_config
from models.hub.family import TOKEN_IDS
from models.hub.tensor_layout import HubLayout


@dataclass(frozen=True)
class _Export:
    """A checked checkpoint, and the tensors to write from it."""

    reader: MergedReader
    model: ModelConfig
    layout: HubLayout
    dtype: str  # in config.json
    entries: dict[str, Entry]  # the tensors to write by their keys, each with its dtype
    tokenizer: list[Path]
    notices: tuple[str, ...]

    def read(self, name: str, source: tuple[slice, ...]) -> Any:
        """Returns a block of our weight `name` rounded to the dtype of its tensor in the folder."""

        def rounded(hub: str, block: tuple[slice, ...]) -> Any:
            return self.layout.read_hub(self.reader.read, hub, block).to(self.entries[hub].dtype)

        return self.layout.read_own(rounded, name, source)


def plan_export(
    checkpoint: Path,
    hf_dir: Path,
    *,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    merge: bool = False,
) -> ConversionPlan:
    """Describes what `export_hugging_face` would do. Raises what it would raise before it writes."""
    reader = _open(checkpoint, hf_dir, merge=merge, overwrite=overwrite)
    if reader.has_adapters and not merge:
        return plan_adapters(_adapters(reader, dtype, tokenizer), hf_dir)
    return _plan(_prepare(reader, dtype, tokenizer), hf_dir, max_shard_bytes)


def _plan(export: _Export, hf_dir: Path, max_shard_bytes: int) -> ConversionPlan:
    parameters = sum(map(prod, export.reader.shapes.values()))
    return ConversionPlan(
        source=str(export.reader.folder),
        target=str(hf_dir),
        model_type=export.model.model_type,
        tensors=len(export.entries),
        parameters=parameters,
        dtype=export.dtype,
        files=tuple(shard_names(list(export.entries.values()), max_shard_bytes)),
        bytes_read=4 * parameters,
        bytes_written=sum(entry.size for entry in export.entries.values()),
        bytes_free=room_at(hf_dir.resolve()),
        notices=export.notices,
    )


def export_hugging_face(
    checkpoint: Path,
    hf_dir: Path,
    *,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    validate: bool = True,
    merge: bool = False,
    report: ReportProgress = no_progress,
) -> ConvertSummary:
    """Writes the Hugging Face folder `hf_dir` from a checkpoint, or the newest of a run; of one with adapters a PEFT
    folder of these alone, unless they are to be merged.

    dtype: fp32, bf16 or fp16; by default that of each tensor of the imported folder, or of the run. tokenizer: its
    folder; by default what the checkpoint knows. Raises CheckpointError, FamilyError or LaunchError. With `validate`
    transformers is loaded, which changes settings of the whole process while it loads: do not call it in a thread
    beside training.
    """
    reader = _open(checkpoint, hf_dir, merge=merge, overwrite=overwrite)
    if reader.has_adapters and not merge:
        adapters = _adapters(reader, dtype, tokenizer)
        return export_adapters(adapters, hf_dir, overwrite=overwrite, validate=validate, report=report)
    export = _prepare(reader, dtype, tokenizer)
    plan = _plan(export, hf_dir, max_shard_bytes)
    check_room(hf_dir.resolve(), plan.bytes_written)
    kept = export.reader.manifest.config.get("hugging_face") or {}
    described = hf_config(export.model, export.dtype, kept.get("config") or _token_ids(export.tokenizer))
    generation = kept.get("generation_config") or {key: described[key] for key in TOKEN_IDS}
    if ends := turn_ends(export.reader.manifest.config, export.tokenizer):
        own = described.get("eos_token_id")
        generation = generation | {"eos_token_id": with_ends(ends, generation.get("eos_token_id", own))}
        described["eos_token_id"] = with_ends(ends, own)
    with new_folder(hf_dir, overwrite=overwrite, marker=CONFIG) as folder:
        write_configs(folder, described, generation)
        copy_tokenizer(export.tokenizer, folder)
        read_hub = partial(export.layout.read_hub, checkpoint_blocks(export.reader))

        def write(stream: Stream) -> None:
            def blocks(entry: Entry) -> Iterator[Tensor]:
                return stream.blocks(read_hub, entry.key, entry.shape, entry.dtype)

            write_weights(folder, list(export.entries.values()), blocks, max_shard_bytes)

        def compare() -> Validation:
            export.reader.verify_weights(partial(report, "comparing digests"))
            return validate_logits(export.model, export.read, folder, report)

        what = f"{export.reader.folder}: in {export.dtype}"
        return convert(plan, write, compare if validate else None, what, report)


def _open(checkpoint: Path, hf_dir: Path, *, merge: bool, overwrite: bool) -> MergedReader:
    existing_folder(hf_dir.resolve())  # a mistyped target is told before the checkpoint is read
    reader = open_checkpoint(checkpoint, MergedReader)
    if merge and not reader.has_adapters:
        raise LaunchError(f"{reader.folder}: holds no adapters to merge, but the model itself: leave --merge out")
    check_replaceable(hf_dir.resolve(), overwrite, ADAPTER if reader.has_adapters and not merge else CONFIG)
    return reader


def _adapters(reader: MergedReader, dtype: str | None, tokenizer: str | Path | None) -> AdapterExport:
    export = _prepare(reader, dtype or "fp32", tokenizer)
    model_type = export.model.model_type
    ends = turn_ends(reader.manifest.config, export.tokenizer)
    kept = reader.manifest.config.get("hugging_face") or {}
    stated = [(kept.get(name) or {}).get("eos_token_id") for name in ("generation_config", "config")]
    known = next((one for one in stated if one is not None), None)
    stops = with_ends(ends, known) if ends and set(ends) - set(_listed(known)) else None
    return AdapterExport(reader, model_type, export.layout, export.dtype, export.tokenizer, export.notices, stops)


def _prepare(reader: MergedReader, dtype: str | None, tokenizer: str | Path | None) -> _Export:
    config = reader.manifest.config
    model = model_of(config.get("model"), str(reader.folder))
    shapes = global_shapes(model)
    biases = [name for name in reader.manifest.tensors if name.endswith(BIAS)]
    if biases and not model.e_score_correction_bias:
        raise CheckpointError(
            f"{reader.folder}: holds a bias of the experts' choice ({biases[0]}), with which it was trained, and a "
            f"Hugging Face {model.model_type} has no place for one: without it tokens would go to other experts"
        )
    if reader.shapes != shapes:
        differing = min(shapes.items() ^ reader.shapes.items())[0]
        raise CheckpointError(f"{reader.folder}: its tensors are not those of its model: {differing}")
    described = family(model.model_type)
    described.check(model)
    layout = described.layout(model, shapes)
    kept = config.get("hugging_face") or {}
    usual = dtype or kept.get("dtype") or config.get("precision", {}).get("dtype", "fp32")
    dtypes: Mapping[str, str] = {} if dtype else kept.get("dtypes") or {}
    for name in (usual, *dtypes.values()):
        if name not in DTYPES:
            raise LaunchError(f"dtype {name!r} is none of {', '.join(DTYPES)}")
    stored = {name: DTYPES[dtypes.get(name, usual)] for name in layout.tensors}
    for name in biases if dtype or not kept else ():  # transformers keeps them so: choices hang on small differences
        stored[layout.hub_names(name)[0]] = torch.float32
    entries = {name: Entry(name, tensor.shape, stored[name]) for name, tensor in layout.tensors.items()}
    found = find_tokenizer(reader.manifest, reader.folder, tokenizer)
    if found.is_doubtful:
        raise CheckpointError(f"{found.problem}: {REMEDY}")
    notice = f"{found.problem}, so the folder has none: {REMEDY}" if found.folder is None else None
    if config.get(ENDS_OF_TURNS) and any(_has_template(path) for path in found.files):
        with suppress(DataError):  # what needs the tokenizer says what is wrong with it
            notice = opening_notice(found.files[0].parent)
    return _Export(reader, model, layout, usual, entries, found.files, (notice,) if notice else ())


def _has_template(path: Path) -> bool:
    """Returns whether a file of a tokenizer has a chat template, without seconds for loading what has none."""
    return "chat_template" in path.name or (path.name == TOKENIZER_CONFIG and b"chat_template" in path.read_bytes())


def turn_ends(config: Mapping[str, Any], tokenizer: list[Path]) -> list[int]:
    """Returns the tokens by which the answers and documents end that a checkpoint was trained on, in this order.

    config: of its manifest, where an older version's data are null: then it is asked of the tokenizer's chat template.
    """
    recorded = config.get(ENDS_OF_TURNS) or []
    ends = [end for end in recorded if isinstance(end, int)]
    if None in recorded and tokenizer and (end := answer_end(tokenizer[0].parent)) is not None:
        ends.append(end)
    return ends


def with_ends(ends: list[int], others: int | list[int] | None) -> int | list[int]:
    """Returns the value of `eos_token_id` that ends a text at these tokens, and at the others as before."""
    all_ends = list(dict.fromkeys([*ends, *_listed(others)]))
    return all_ends if len(all_ends) > 1 else all_ends[0]


def _listed(ends: int | list[int] | None) -> list[int]:
    return [ends] if isinstance(ends, int) else ends or []


def _token_ids(tokenizer: list[Path]) -> dict[str, Any]:
    """Returns the end token of a run's own tokenizer, at which generation stops."""
    path = next((path for path in tokenizer if path.name == TOKENIZER), None)
    return {} if path is None else {"eos_token_id": inspect_tokenizer(path).eos_token_id}
