"""`megalite import`: converts a Hugging Face folder or hub id to a checkpoint, from which any layout can start.

The checkpoint appears under its name only after our serial model and transformers' have computed the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from launch.conversion.huggingface.checkpoint_tokenizer import FILES_SHA256, files_sha256
from launch.conversion.huggingface.folder_lookup import fetched_folder, is_hub_id, model_of
from launch.conversion.huggingface.model_folder import DTYPES, ModelFolder, open_model_folder
from launch.conversion.huggingface.progress import ConversionPlan, ConvertSummary, ReportProgress, no_progress
from launch.conversion.huggingface.serial_model import global_shapes
from launch.conversion.huggingface.streaming import Stream, convert
from launch.conversion.huggingface.validation import Validation, validate_logits
from launch.errors import LaunchError
from megalite.checkpoint.atomic_folder import check_replaceable, check_room, new_folder
from megalite.checkpoint.durable_files import room_at
from megalite.checkpoint.huggingface.folder import INDEX, WEIGHTS
from megalite.checkpoint.huggingface.json_files import CONFIG, read_json
from megalite.checkpoint.huggingface.tokenizer_folder import tokenizer_files
from megalite.checkpoint.manifest import MANIFEST, STEP, Manifest, step_folder
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.writer import write_weights_only
from models.families import model_config


def plan_import(
    hf_dir: str | Path, checkpoint: Path, *, dtype: str | None = None, overwrite: bool = False
) -> ConversionPlan:
    """Describes what `import_hugging_face` would do, without weights. Raises what it would raise before it writes."""
    _check_target(checkpoint, overwrite)
    _check_dtype(dtype)
    if is_hub_id(hf_dir):
        return _plan_of_hub_id(str(hf_dir), checkpoint)
    return _plan(open_model_folder(hf_dir), checkpoint, dtype)


def _plan(source: ModelFolder, checkpoint: Path, dtype: str | None) -> ConversionPlan:
    parameters = sum(map(prod, source.shapes.values()))
    return ConversionPlan(
        source=str(source.folder),
        target=str(checkpoint),
        model_type=source.model.model_type,
        tensors=len(source.layout.tensors),
        parameters=parameters,
        dtype=dtype or source.dtype,
        files=tuple(source.files.files),
        bytes_read=source.files.bytes,
        bytes_written=4 * parameters,
        bytes_free=room_at(checkpoint.resolve()),
        notices=source.files.notices,
    )


def _plan_of_hub_id(place: str, checkpoint: Path) -> ConversionPlan:
    folder = fetched_folder(place, weights=False)
    config = read_json(folder / CONFIG)
    model = model_of(model_config(config), str(folder / CONFIG))
    parameters = sum(map(prod, global_shapes(model).values()))
    places = read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else {"": WEIGHTS}
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return ConversionPlan(
        source=place,
        target=str(checkpoint),
        model_type=model.model_type,
        tensors=None,
        parameters=parameters,
        dtype=stored,
        files=tuple(sorted(set(map(str, places.values())))) if isinstance(places, dict) else (),
        bytes_read=(4 if stored == "float32" else 2) * parameters,
        bytes_written=4 * parameters,
        bytes_free=room_at(checkpoint.resolve()),
        notices=("only its config.json was fetched from the hub: its tensors were not looked at",),
    )


def import_hugging_face(
    hf_dir: str | Path,
    checkpoint: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    validate: bool = True,
    report: ReportProgress = no_progress,
) -> ConvertSummary:
    """Writes the weights of a Hugging Face folder or hub id to the checkpoint folder `checkpoint`, at step 0.

    dtype: the format of later exports, by default that of each tensor in the folder; the checkpoint itself holds fp32,
    whatever the folder is stored in. Raises CheckpointError, FamilyError or LaunchError.
    """
    _check_target(checkpoint, overwrite)
    _check_dtype(dtype)
    source = open_model_folder(hf_dir)
    plan = _plan(source, checkpoint, dtype)
    check_room(checkpoint.resolve(), plan.bytes_written)
    with new_folder(checkpoint, overwrite=overwrite, marker=MANIFEST) as written:

        def write(stream: Stream) -> None:
            def blocks(name: str) -> Iterator[Tensor]:
                return stream.blocks(source.read, name, source.shapes[name], torch.float32)

            write_weights_only(written, source.shapes, blocks, _manifest(source, dtype))

        def compare() -> Validation:
            return validate_logits(source.model, CheckpointReader(written).read, source.folder, report)

        return convert(plan, write, compare if validate else None, f"{source.folder}:", report)


def _check_target(checkpoint: Path, overwrite: bool) -> None:
    name = checkpoint.resolve().name
    if STEP.fullmatch(name) and name != step_folder(0):
        raise LaunchError(
            f"{checkpoint}: a folder of this name holds a run's checkpoint of that step, an import is of step 0: "
            "choose another name"
        )
    check_replaceable(checkpoint.resolve(), overwrite, MANIFEST)


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise LaunchError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")


def _manifest(source: ModelFolder, dtype: str | None) -> Manifest:
    folder = source.folder.resolve()
    files, carried = tokenizer_files(folder), source.carried(dtype)
    if files and source.tokenizer_sha256 is None:
        carried[FILES_SHA256] = files_sha256(files)
    return Manifest(
        step=0,
        # not part of `model`, because only exports use it
        config={"model": source.model.model_dump(mode="json"), "hugging_face": carried},
        tokenizer=str(folder) if files else None,
        tokenizer_sha256=source.tokenizer_sha256,
        state={},
        tensors={},
        files={},
    )
