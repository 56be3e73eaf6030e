"""The command `megalite prepare`: progress and a summary around `data_pipeline.prepare.prepare`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.cli.options import AsJson
from launch.cli.prepare_output import print_conversations, print_summary, words_of
from launch.errors import INTERRUPTED_CODE, LaunchError
from launch.output import FIRST_WORD_S, print_json, spinner
from launch.runtime.logs import get_logger
from megalite.units import plural

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
    tokenizer: Annotated[
        Path,
        typer.Option("--tokenizer", "-t", help="Folder with a tokenizer.json; --train-vocab-size N makes one."),
    ],
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
        bool, typer.Option("--chat", help="Rows are conversations: apply the chat template, train on the answers.")
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
    show: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="With --chat: print the first N conversations as a model reads them, with what carries loss; nothing "
            "is written.",
        ),
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize text into memory-mapped files (Megatron's .bin/.idx). An interrupted run continues where it stopped.

    The same command a second time changes nothing; data or a tokenizer made from something else is replaced only with
    --overwrite.

    With --chat, loss falls on what the assistant writes alone; the mask is kept beside the tokens, in .loss.bin.

    Example: `megalite prepare "corpus/**/*.md" notes.jsonl.gz pages.parquet -t my_tokenizer -o data/corpus`
    """
    started = time.monotonic()
    _check_only_of_chats(chat, train_on, chat_date, show)
    if chat:
        _check_chat(begin_token or fill_in_the_middle > 0, train_vocab_size, encoder)
    try:
        with spinner("reading the sources", is_shown=not as_json, first_s=FIRST_WORD_S) as describe:
            # imports take seconds, too
            from data_pipeline.document import BadRows
            from data_pipeline.prepare.overwrite_check import check_vocabulary
            from data_pipeline.prepare.plan import PrepareOptions, plan_job
            from data_pipeline.prepare.prepare import prepare as prepare_data
            from data_pipeline.prepare.tokenizer_text import training_text
            from data_pipeline.storage.paths import output_prefix
            from data_pipeline.tokenizers.training import TrainedTokenizer, trained_tokenizer

            prefix = output_prefix(output)
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
            if show:
                from data_pipeline.prepare.shown_conversations import shown_conversations

                job, bad_rows = plan_job(sources, where, options), BadRows(options.skip_bad_rows)
                shown = list(shown_conversations(job, show, bad_rows))
            elif train_vocab_size is not None:
                texts, size = training_text(sources, options, log.warning)
                if not overwrite:
                    check_vocabulary(prefix, sources, tokenizer, train_vocab_size)
                counted = _counted(texts, train_vocab_size, size, describe)
                folder = tokenizer.absolute()
                where = trained_tokenizer(counted, folder, train_vocab_size, sources=sources, overwrite=overwrite)
            if not show:
                compared = ", after a comparison of both encoders on a part of it" if encoder == "fast" else ""
                describe(f"reading and encoding the text{compared}")
                summary = prepare_data(
                    sources,
                    prefix,
                    where,
                    options,
                    workers=workers,
                    overwrite=overwrite,
                    progress=lambda progress: describe(words_of(progress)),
                    notice=log.warning,
                    dry_run=dry_run,
                )
    except KeyboardInterrupt:
        log.warning("interrupted; the same command goes on from the text that is encoded already")
        raise typer.Exit(INTERRUPTED_CODE) from None
    if show and as_json:
        print_json([asdict(conversation) for conversation in shown])
    elif show:
        print_conversations(shown)
        if bad_rows.count:
            log.warning(f"{plural(bad_rows.count, 'bad row')} left out; the first: {bad_rows.first[0]}")
    elif as_json:
        print_json(asdict(summary))
    else:
        print_summary(replace(summary, seconds=time.monotonic() - started))


def _counted(
    texts: Iterator[str], vocab_size: int, source_bytes: int | None, describe: Callable[[str], None]
) -> Iterator[str]:
    """Yields texts for the training of a tokenizer, and says how many of them have been read."""
    read = 0
    for text in texts:
        read += len(text)
        share = f", {min(0.99, read / source_bytes):.0%}" if source_bytes else ""
        describe(f"reading the text to train a tokenizer of {vocab_size:,} entries{share}")
        yield text
    describe(f"training a tokenizer of {vocab_size:,} entries on {read / 1e6:,.1f} million characters")


def _check_only_of_chats(chat: bool, train_on: str | None, chat_date: datetime | None, show: int) -> None:
    """Raises LaunchError for options of conversations without --chat."""
    given = {
        "--train-on says which turns of conversations carry loss": train_on is not None,
        "--chat-date is for the template of conversations": chat_date is not None,
        "--show shows conversations and what of them carries loss": show > 0,
    }
    for what in (what for what, is_given in given.items() if is_given and not chat):
        raise LaunchError(f"{what}: give --chat too, or leave it out")


def _check_chat(adds_tokens: bool, train_vocab_size: int | None, encoder: str) -> None:
    """Raises LaunchError for options that have no meaning for conversations."""
    if adds_tokens:
        raise LaunchError(
            "with --chat the template writes all special tokens: leave out --begin-token and --fill-in-the-middle"
        )
    if train_vocab_size is not None:
        raise LaunchError(
            "--train-vocab-size trains a tokenizer without a chat template: train it on text first, write a "
            "chat_template.jinja into its folder, and leave the option out with --chat"
        )
    if encoder == "fast":
        raise LaunchError("--encoder fast is for text: conversations are encoded by the exact one, leave it out")
