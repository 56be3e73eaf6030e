"""The command `megalite prepare`: progress and a summary around `data_pipeline.prepare.prepare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.cli.options import AsJson
from launch.output import print_json, spinner

if TYPE_CHECKING:
    from data_pipeline.prepare.prepare import PrepareProgress

PYTHON_STDLIB = "python-stdlib"  # text that every machine with Python has


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(help="Text files, folders, globs, .jsonl(.gz), dataset:NAME[:SPLIT], or python-stdlib."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Prefix of the output files.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", "-t", help="Folder with a tokenizer.json.")],
    train_vocab_size: Annotated[
        int | None,
        typer.Option("--train-vocab-size", help="First train a byte-level BPE of this size into --tokenizer."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text in .jsonl and datasets.")] = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: all cores.")] = None,
    append_eos: Annotated[bool, typer.Option(help="Append the tokenizer's end token to every document.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize text into memory-mapped files (Megatron's .bin/.idx). An interrupted run continues where it stopped.

    Example: `megalite prepare "corpus/**/*.md" -t my_tokenizer -o data/corpus`
    """
    from data_pipeline.prepare.prepare import prepare as prepare_data
    from data_pipeline.sources import open_sources
    from data_pipeline.tokenizer import python_stdlib_sources, train_tokenizer

    stdlib = [str(path) for path in python_stdlib_sources()] if PYTHON_STDLIB in sources else []
    sources = [path for source in sources for path in (stdlib if source == PYTHON_STDLIB else [source])]
    with spinner("reading the sources", is_shown=not as_json) as describe:
        if train_vocab_size is not None and not dry_run:
            describe(f"training a tokenizer of {train_vocab_size:,} entries")
            texts = (piece.text for source in open_sources(sources, text_field) for piece in source.pieces())
            train_tokenizer(texts, tokenizer, train_vocab_size)

        def show(progress: PrepareProgress) -> None:
            rate = progress.tokens / max(progress.seconds, 1e-9)
            describe(f"{progress.documents:,} documents, {progress.tokens:,} tokens, {rate:,.0f} tokens/s")

        summary = prepare_data(
            sources,
            output,
            tokenizer.absolute(),  # kept with the tokens, for runs and exports started elsewhere
            text_field=text_field,
            workers=workers,
            append_eos=append_eos,
            progress=show,
            dry_run=dry_run,
        )
    if as_json:
        print_json(asdict(summary))
    elif summary.dry_run:
        size = f", {summary.source_bytes:,} bytes" if summary.source_bytes is not None else ""
        print(f"dry run: would encode {summary.source_count} sources{size} into {summary.output}.bin ({summary.dtype})")
    else:
        done = "already prepared" if summary.reused else f"prepared in {summary.seconds:.1f} s"
        counts = f"{summary.document_count:,} documents, {summary.token_count:,} tokens"
        print(f"{summary.output}.bin: {counts}, vocabulary {summary.vocab_size:,}, {done}")
