"""The commands `megalite import` and `megalite export`, which launch/conversion implements. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data_pipeline.storage.paths import decimal_size
from launch.cli.options import AsJson, ModelTokenizer
from launch.errors import INTERRUPTED_CODE, LaunchError
from launch.output import check_local, loading, print_json, progress_bar
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.json_files import ADAPTER, CONFIG
from megalite.checkpoint.manifest import MANIFEST, find_latest, no_checkpoint

if TYPE_CHECKING:
    from launch.conversion.huggingface.progress import ConversionPlan, ConvertSummary

log = get_logger(__name__)
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)i?B?", re.IGNORECASE)
COPY = "give a local folder, and copy it afterwards"
StoredDtype = Literal["fp32", "bf16", "fp16"]  # of the weights in a Hugging Face folder
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing target of the same kind.")]
Validate = Annotated[bool, typer.Option(help="Compare the logits with those of transformers.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be converted; write nothing.")]


def import_(
    hf_dir: Annotated[str, typer.Argument(help="Hugging Face folder, or a model's id on the hub.", metavar="HF_DIR")],
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder to write.", metavar="CHECKPOINT")],
    dtype: Annotated[
        StoredDtype | None,
        typer.Option(help="Dtype of later exports; default: as in HF_DIR. The checkpoint itself holds fp32."),
    ] = None,
    overwrite: Overwrite = False,
    validate: Validate = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Turn a Hugging Face model into a checkpoint that any layout starts from (`training.initialize_from`).

    Weights are streamed, so the conversion needs memory for part of one tensor. The logits are then compared with
    those of transformers, which needs memory for the whole model twice, or for as many of its layers as fit.

    Example: `megalite import ./Llama-3.2-1B runs/llama-1b/start`
    """
    from launch.conversion.huggingface.folder_lookup import is_hub_id
    from megalite.checkpoint.atomic_folder import check_replaceable

    check_local(checkpoint, COPY)
    check_replaceable(checkpoint.resolve(), overwrite, MANIFEST)
    if not is_hub_id(hf_dir) and not Path(hf_dir).exists():
        raise CheckpointError(f"{hf_dir}: there is no such folder")
    with loading("PyTorch and transformers"):
        from launch.conversion.huggingface.importing import import_hugging_face, plan_import

    if dry_run:
        _print_plan(plan_import(hf_dir, checkpoint, dtype=dtype, overwrite=overwrite), "import", as_json)
        return
    with _watched() as report_progress:
        summary = import_hugging_face(
            hf_dir, checkpoint, dtype=dtype, overwrite=overwrite, validate=validate, report=report_progress
        )
    _print_summary(summary, as_json, f"a config with `training.initialize_from: {checkpoint}` starts from it")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint, or run folder (its newest).", metavar="CHECKPOINT")],
    hf_dir: Annotated[Path, typer.Argument(help="Folder to write.", metavar="HF_DIR")],
    dtype: Annotated[
        StoredDtype | None, typer.Option(help="Dtype of all weights; default: that of the import, or of training.")
    ] = None,
    tokenizer: ModelTokenizer = None,
    max_shard_size: Annotated[str, typer.Option(help='Largest size of a weight file, such as "500MB".')] = "2GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with adapters the whole model, with them merged into its weights.")
    ] = False,
    overwrite: Overwrite = False,
    validate: Validate = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Turn a checkpoint of any layout into a Hugging Face folder for `transformers`; adapters into one for `peft`.

    The run that wrote it may still be training. Weights are streamed and logits compared as in `megalite import`.

    Example: `megalite export runs/quickstart runs/quickstart/hf`
    """
    from megalite.checkpoint.atomic_folder import check_replaceable

    check_local(hf_dir, COPY)
    marker = next((name for name in (ADAPTER, CONFIG) if (hf_dir / name).is_file()), CONFIG)
    check_replaceable(hf_dir.resolve(), overwrite, marker)
    folder, unusable = find_latest(checkpoint)
    if folder is None:
        raise CheckpointError(unusable[0] if unusable else no_checkpoint(checkpoint))
    options: dict[str, Any] = {
        "dtype": dtype,
        "tokenizer": tokenizer,
        "max_shard_bytes": parse_size(max_shard_size),
        "overwrite": overwrite,
        "merge": merge,
    }
    with loading("PyTorch and transformers"):
        from launch.conversion.huggingface.exporting import export_hugging_face, plan_export

    if dry_run:
        _print_plan(plan_export(checkpoint, hf_dir, **options), "export", as_json)
        return
    with _watched() as report_progress:
        summary = export_hugging_face(checkpoint, hf_dir, **options, validate=validate, report=report_progress)
    what_next = f"`megalite generate {quote(str(hf_dir))} --prompt ...` continues a text with it"
    if (hf_dir / "adapter_config.json").is_file():
        what_next = "peft loads these adapters onto their base model; --merge writes a whole model instead"
    _print_summary(summary, as_json, what_next)


def parse_size(text: str) -> int:
    """Parses a size such as "500MB", "2 GB" (powers of 1000) or "1GiB" (of 1024) into bytes. Raises LaunchError."""
    found = SIZE.fullmatch(text.strip())
    size = 0
    if found:
        base = 1024 if "i" in text.lower() else 1000
        size = int(float(found[1]) * base ** POWERS[found[2].lower()])
    if size < 1000:
        raise LaunchError(f"--max-shard-size {text!r} is no size of a file of weights: give one such as 500MB or 2GB")
    return size


@contextmanager
def _watched() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar on a terminal; Ctrl-C ends the command with a sentence instead of a traceback."""
    try:
        with progress_bar() as report_progress:
            yield report_progress
    except KeyboardInterrupt:
        log.warning("interrupted; nothing was written")
        raise typer.Exit(INTERRUPTED_CODE) from None


def _print_plan(plan: ConversionPlan, action: str, as_json: bool) -> None:
    if as_json:
        print_json(asdict(plan))
        return
    tensors = "" if plan.tensors is None else f"{plan.tensors} tensors, "
    fits = "" if plan.bytes_written <= plan.bytes_free else ", which are too few"
    say(
        f"dry run: would {action} {plan.source} -> {plan.target}: {plan.model_type}, {tensors}{plan.parameters:,} "
        f"parameters, {plan.dtype}\n"
        f"files with weights on the Hugging Face side: {', '.join(plan.files)}\n"
        f"reads {decimal_size(plan.bytes_read)}, writes {decimal_size(plan.bytes_written)}; "
        f"{decimal_size(plan.bytes_free)} are free there{fits}"
    )
    for notice in plan.notices:
        log.info(notice)


def _print_summary(summary: ConvertSummary, as_json: bool, what_next: str) -> None:
    if as_json:
        print_json(asdict(summary))
        return
    moved = summary.bytes_read + summary.bytes_written
    memory = "" if summary.peak_memory_bytes is None else f", {summary.peak_memory_bytes / 1e6:,.0f} MB of memory"
    say(
        f"{summary.source} -> {summary.target}: {summary.model_type}, {summary.tensors} tensors, "
        f"{summary.parameters:,} parameters, {summary.dtype}\n"
        f"{decimal_size(summary.bytes_read)} read and {decimal_size(summary.bytes_written)} written in "
        f"{summary.seconds:.1f} s ({decimal_size(moved / max(summary.seconds, 1e-9))}/s){memory}"
    )
    if not summary.compared:
        say("NOT VALIDATED: this model's logits were not compared with those of transformers, and may be wrong")
    elif summary.logit_difference is None:
        say(f"validated in {summary.validation_seconds:.1f} s: {', '.join(summary.compared)}; no logits were compared")
    else:
        say(
            f"validated in {summary.validation_seconds:.1f} s: logits within {summary.logit_difference:.1e} of their "
            f"spread of transformers', on {', '.join(summary.compared)}"
        )
    for notice in summary.notices:
        log.info(notice)
    log.info(f"next: {what_next}")
