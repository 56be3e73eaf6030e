"""`megalite prepare` for people: progress and a summary around `data_pipeline.prepare`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data_pipeline.prepare import PrepareProgress, PrepareSummary, prepare
from data_pipeline.sources import open_sources
from data_pipeline.tokenizer import python_stdlib_sources, train_tokenizer

PYTHON_STDLIB = "python-stdlib"  # a text that every machine with this program has


def prepare_data(
    sources: list[str],
    output: Path,
    tokenizer: Path,
    *,
    train_vocab_size: int | None,
    text_field: str,
    workers: int | None,
    append_eos: bool,
    dry_run: bool,
    quiet: bool,
) -> PrepareSummary:
    """Trains the tokenizer where asked for, encodes, and says what came out unless `quiet`."""
    sources = list(_expanded(sources))
    console = Console(quiet=quiet, soft_wrap=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as display:
        task = display.add_task("reading the sources")
        if train_vocab_size is not None and not dry_run:
            display.update(task, description=f"training a tokenizer of {train_vocab_size:,} entries")
            texts = (piece.text for source in open_sources(sources, text_field) for piece in source.pieces())
            train_tokenizer(texts, tokenizer, train_vocab_size)

        def show(progress: PrepareProgress) -> None:
            rate = progress.tokens / max(progress.seconds, 1e-9)
            display.update(
                task,
                description=f"{progress.documents:,} documents, {progress.tokens:,} tokens, {rate:,.0f} tokens/s",
            )

        summary = prepare(
            sources,
            output,
            tokenizer.absolute(),  # kept with the tokens, for runs and exports started elsewhere
            text_field=text_field,
            workers=workers,
            append_eos=append_eos,
            progress=show,
            dry_run=dry_run,
        )
    console.print(_sentence(summary), highlight=False, markup=False)
    return summary


def _expanded(sources: list[str]) -> Iterator[str]:
    for source in sources:
        if source == PYTHON_STDLIB:
            yield from (str(path) for path in python_stdlib_sources())
        else:
            yield source


def _sentence(summary: PrepareSummary) -> str:
    if summary.dry_run:
        size = f", {summary.source_bytes:,} bytes" if summary.source_bytes is not None else ""
        return f"dry run: would encode {summary.source_count} sources{size} into {summary.output}.bin ({summary.dtype})"
    done = "already prepared" if summary.reused else f"prepared in {summary.seconds:.1f} s"
    return (
        f"{summary.output}.bin: {summary.document_count:,} documents, {summary.token_count:,} tokens, vocabulary "
        f"{summary.vocab_size:,}, {done}"
    )
