"""The command `megalite prepare`: progress and a summary around `data_pipeline.prepare.prepare`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.cli.options import AsJson
from launch.errors import INTERRUPTED_CODE, LaunchError
from launch.output import print_json, spinner
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from megalite.planner.units import plural

if TYPE_CHECKING:
    from data_pipeline.prepare.prepare import PrepareProgress, PrepareSummary

log = get_logger(__name__)


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Text files (.txt, .md, source code), .jsonl, .json, .csv and .parquet files, compressed (.gz, .zst, "
            ".bz2, .xz, .lz4) or not, folders and globs of them, here or at a URL (s3://, gs://, hf://, https://), "
            "dataset:NAME_OR_PATH[:SPLIT], or python-stdlib."
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="Prefix of the output files.", metavar="PREFIX")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", "-t", help="Folder with a tokenizer.json.")],
    train_vocab_size: Annotated[
        int | None,
        typer.Option("--train-vocab-size", help="First train a byte-level BPE of this size into --tokenizer."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text of a row.")] = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: all cores.")] = None,
    append_eos: Annotated[bool, typer.Option(help="Append the tokenizer's end token to every document.")] = True,
    begin_token: Annotated[
        bool, typer.Option("--begin-token", help="Put the tokenizer's begin token before every document.")
    ] = False,
    special_tokens: Annotated[
        Literal["keep", "as-text", "refuse"] | None,
        typer.Option(
            help="What the spelling of a special token in a text becomes: that token, text, or an error; default: "
            "keep, with --chat refuse."
        ),
    ] = None,
    fill_in_the_middle: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the documents whose middle is put last.", metavar="RATE")
    ] = 0.0,
    on_bad_row: Annotated[
        Literal["refuse", "skip"],
        typer.Option(help="What a row without a document does: end the command, or be left out and counted."),
    ] = "refuse",
    longest_row: Annotated[
        int,
        typer.Option(
            min=1,
            max=2047,
            metavar="MIB",
            help="Longest line of JSON or row of a table that is read; 26 times it in memory.",
        ),
    ] = 16,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Rows are conversations: apply the chat template, train on the answers."),
    ] = False,
    train_on: Annotated[
        Literal["all-turns", "last-turn"] | None,
        typer.Option(
            help="With --chat: which of the assistant's turns carry loss; last-turn: those after the user's last "
            "message; default: all-turns."
        ),
    ] = None,
    chat_date: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d"], help="With --chat: the date that a template writes, if it asks for today's."
        ),
    ] = None,
    encoder: Annotated[
        Literal["exact", "fast"],
        typer.Option(
            help="fast: encode with gigatoken (pip install 'megalite[fast]'), after a comparison with the exact "
            "encoder on a part of the text; it writes the same with far less CPU."
        ),
    ] = "exact",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace prepared data or a trained tokenizer made from something else.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize text into memory-mapped files (Megatron's .bin/.idx). An interrupted run continues where it stopped.

    The same command a second time changes nothing; data or a tokenizer made from something else is replaced only with
    --overwrite.

    With --chat, loss falls on what the assistant writes alone; the mask is kept beside the tokens, in .loss.bin.

    Example: `megalite prepare "corpus/**/*.md" notes.jsonl.gz pages.parquet -t my_tokenizer -o data/corpus`
    """
    from data_pipeline.prepare.existing import check_vocabulary
    from data_pipeline.prepare.output import output_prefix
    from data_pipeline.prepare.plan import PrepareOptions, training_text
    from data_pipeline.prepare.prepare import prepare as prepare_data
    from data_pipeline.tokenizer import TrainedTokenizer, trained_tokenizer

    prefix = output_prefix(output)
    if chat_date is not None and not chat:
        raise LaunchError("--chat-date is for the template of conversations: give --chat too, or leave it out")
    if chat and encoder == "fast":
        raise LaunchError("--encoder fast is for text: conversations are encoded by the exact one, leave it out")
    _check_options(chat, train_on, begin_token or fill_in_the_middle > 0, train_vocab_size)
    options = PrepareOptions(
        text_field,
        append_eos and not chat,
        begin_token,
        special_tokens or ("refuse" if chat else "keep"),
        on_bad_row == "skip",
        fill_in_the_middle,
        (train_on or "all-turns") if chat else None,
        chat_date.date().isoformat() if chat_date else None,
        encoder,
        longest_row << 20,
    )
    # kept with the tokens, for runs and exports started elsewhere
    where: Path | TrainedTokenizer = tokenizer.absolute()
    try:
        with spinner("reading the sources", is_shown=not as_json) as describe:
            if train_vocab_size is not None:
                texts = training_text(sources, options)
                if not overwrite:
                    check_vocabulary(prefix, sources, tokenizer, train_vocab_size)
                describe(f"training a tokenizer of {train_vocab_size:,} entries")
                where = trained_tokenizer(
                    texts, tokenizer.absolute(), train_vocab_size, sources=sources, overwrite=overwrite
                )

            compared = ", after a comparison of both encoders on a part of it" if encoder == "fast" else ""
            describe(f"reading and encoding the text{compared}")
            summary = prepare_data(
                sources,
                prefix,
                where,
                options,
                workers=workers,
                overwrite=overwrite,
                progress=lambda progress: describe(_words_of(progress)),
                notice=log.warning,
                dry_run=dry_run,
            )
    except KeyboardInterrupt:
        log.warning("interrupted; the same command goes on from the text that is encoded already")
        raise typer.Exit(INTERRUPTED_CODE) from None
    if as_json:
        print_json(asdict(summary))
    else:
        _print_summary(summary)


def _words_of(progress: PrepareProgress) -> str:
    if progress.doing == "counting":
        return f"counting the documents for --fill-in-the-middle: {progress.documents:,}"
    if progress.doing == "joining":
        return f"joining the encoded parts: {progress.parts_done:,} of {progress.part_count:,}"
    rate = progress.tokens / max(progress.seconds, 1e-9)
    return f"{progress.documents:,} documents, {progress.tokens:,} tokens, {rate:,.0f} tokens/s"


def _check_options(chat: bool, train_on: str | None, adds_tokens: bool, train_vocab_size: int | None) -> None:
    """Raises LaunchError for options that have no meaning together."""
    if train_on is not None and not chat:
        raise LaunchError("--train-on says which turns of conversations carry loss: give --chat too, or leave it out")
    if chat and adds_tokens:
        raise LaunchError(
            "with --chat the template writes all special tokens: leave out --begin-token and --fill-in-the-middle"
        )
    if chat and train_vocab_size is not None:
        raise LaunchError(
            "--train-vocab-size trains a tokenizer without a chat template: train it on text first, write a "
            "chat_template.jinja into its folder, and leave the option out with --chat"
        )


def _print_summary(summary: PrepareSummary) -> None:
    from data_pipeline.errors import first_names

    if summary.repeated:
        names, files = summary.repeated[0], plural(len(summary.repeated), "file")
        which = f"{first_names(list(dict.fromkeys(names)))} ({len(names)} times)"
        log.warning(f"{files} read more than once, which counts as more documents: {which}")
    if summary.discarded_parts:
        log.info(f"discarded {summary.discarded_parts} parts that an interrupted run had encoded from something else")
    if summary.dry_run and not summary.reused:
        size = f", {summary.source_bytes:,} bytes" if summary.source_bytes is not None else ""
        files = plural(summary.source_count, "source")
        say(f"dry run: would encode {files}{size} into {summary.output}.bin ({summary.dtype})")
        return
    done = "already prepared" if summary.reused else f"prepared in {summary.seconds:.1f} s"
    counts = f"{summary.document_count:,} documents, {summary.token_count:,} tokens"
    if summary.skipped_rows:
        first = f"; the first: {summary.first_skipped[0]}" if summary.first_skipped else ""
        log.warning(f"{plural(summary.skipped_rows, 'bad row')} left out{first}")
    say(f"{summary.output}.bin: {counts}, vocabulary {summary.vocab_size:,}, {done}")
