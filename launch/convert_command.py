"""`megalite import|export`: the words of the command line, a bar while they work, what they say after. No torch."""

from __future__ import annotations

import enum
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.arguments import AsJson
from launch.errors import INTERRUPTED_CODE, LaunchError

if TYPE_CHECKING:
    from launch.convert import ConversionPlan, ConvertSummary

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)i?B?", re.IGNORECASE)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class StoredDtype(enum.StrEnum):
    """What a Hugging Face folder is stored in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there, if it is of the same kind.")]
Validate = Annotated[bool, typer.Option(help="Compare logits with transformers.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be converted; write nothing.")]


def import_(
    hf_dir: Annotated[str, typer.Argument(help="Hugging Face folder, or a model's id on the hub.", metavar="HF_DIR")],
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder to write.", metavar="CHECKPOINT")],
    dtype: Annotated[
        StoredDtype | None,
        typer.Option(help="What exports of it get; default: as in HF_DIR. The checkpoint itself holds fp32."),
    ] = None,
    overwrite: Overwrite = False,
    validate: Validate = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Turn a Hugging Face model into a checkpoint that any layout starts from (`training.initialize_from`).

    Weights are streamed, so memory is needed for a part of one tensor; then logits are compared with transformers',
    which takes the whole model twice, or as many of its layers as fit.

    Example: `megalite import ./Llama-3.2-1B runs/llama-1b/start`
    """
    from launch.convert import import_hugging_face, plan_import

    kept = None if dtype is None else dtype.value
    if dry_run:
        _tell_plan(plan_import(hf_dir, checkpoint, dtype=kept, overwrite=overwrite), "import", as_json)
        return
    with _watched() as tell:
        summary = import_hugging_face(hf_dir, checkpoint, dtype=kept, overwrite=overwrite, validate=validate, tell=tell)
    _tell_summary(summary, as_json)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint, or run folder: its newest.", metavar="CHECKPOINT")],
    hf_dir: Annotated[Path, typer.Argument(help="Folder to write.", metavar="HF_DIR")],
    dtype: Annotated[
        StoredDtype | None, typer.Option(help="Of all weights; default: what was imported, or trained in.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help='Of a file with weights, such as "500MB".')] = "2GB",
    overwrite: Overwrite = False,
    validate: Validate = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Turn a checkpoint of any layout into a Hugging Face folder that `transformers` loads.

    The run that wrote it may go on meanwhile. Weights are streamed, and logits compared, as in `megalite import`.

    Example: `megalite export runs/quickstart runs/quickstart/hf`
    """
    from launch.convert import export_hugging_face, plan_export

    size, stored = parse_size(max_shard_size), None if dtype is None else dtype.value
    if dry_run:
        plan = plan_export(checkpoint, hf_dir, dtype=stored, max_shard_bytes=size, overwrite=overwrite)
        _tell_plan(plan, "export", as_json)
        return
    with _watched() as tell:
        summary = export_hugging_face(
            checkpoint,
            hf_dir,
            dtype=stored,
            max_shard_bytes=size,
            overwrite=overwrite,
            validate=validate,
            tell=tell,
        )
    _tell_summary(summary, as_json)


def parse_size(text: str) -> int:
    """Bytes of "500MB", "2 GB" (powers of 1000) or "1GiB" (of 1024). Raises LaunchError."""
    found = SIZE.fullmatch(text.strip())
    size = 0
    if found:
        base = 1024 if "i" in text.lower() else 1000
        size = int(float(found[1]) * base ** POWERS[found[2].lower()])
    if size < 1:
        raise LaunchError(f"max-shard-size {text!r} is no size of a file: give one such as 500MB or 2GB")
    return size


@contextmanager
def _watched() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the terminal, if there is one; Ctrl-C ends with a sentence."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        try:
            yield tell
        except KeyboardInterrupt:
            bar.stop()
            print("megalite: interrupted; nothing was written", file=sys.stderr)
            raise typer.Exit(INTERRUPTED_CODE) from None


def _tell_plan(plan: ConversionPlan, what: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(plan), indent=2))
        return
    tensors = "" if plan.tensors is None else f"{plan.tensors} tensors, "
    print(
        f"dry run: would {what} {plan.source} -> {plan.target}: {plan.model_type}, {tensors}{plan.parameters:,} "
        f"parameters, {plan.dtype}"
    )
    print(f"files with weights on the Hugging Face side: {', '.join(plan.files)}")
    fits = "" if plan.bytes_written <= plan.bytes_free else ", which are too few"
    print(
        f"reads {_gigabytes(plan.bytes_read)}, writes {_gigabytes(plan.bytes_written)}; {_gigabytes(plan.bytes_free)} "
        f"are free there{fits}"
    )
    _tell_notices(plan.notices)


def _tell_summary(summary: ConvertSummary, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(summary), indent=2))
        return
    print(
        f"{summary.source} -> {summary.target}: {summary.model_type}, {summary.tensors} tensors, "
        f"{summary.parameters:,} parameters, {summary.dtype}"
    )
    moved = summary.bytes_read + summary.bytes_written
    memory = "" if summary.peak_memory_bytes is None else f", {summary.peak_memory_bytes / 1e6:,.0f} MB of memory"
    print(
        f"{_gigabytes(summary.bytes_read)} read and {_gigabytes(summary.bytes_written)} written in "
        f"{summary.seconds:.1f} s ({_gigabytes(moved / max(summary.seconds, 1e-9))}/s){memory}"
    )
    if summary.logit_difference is None:
        print("NOT VALIDATED: nobody has compared this model's logits with transformers', it may compute nonsense")
    else:
        print(
            f"validated in {summary.validation_seconds:.1f} s: logits within {summary.logit_difference:.1e} of their "
            f"spread of transformers', on {', '.join(summary.compared)}"
        )
    _tell_notices(summary.notices)


def _tell_notices(notices: tuple[str, ...]) -> None:
    for notice in notices:
        print(f"megalite: {notice}")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
