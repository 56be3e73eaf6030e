"""The words of `megalite prepare`: how far it is, conversations with their loss mask, and what it has written."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from shlex import quote
from typing import TYPE_CHECKING

from launch.output import console
from launch.runtime.logs import get_logger
from launch.runtime.printing import say, visible
from megalite.units import about, plural

if TYPE_CHECKING:
    from data_pipeline.prepare.prepare import PrepareProgress, PrepareSummary
    from data_pipeline.prepare.shown_conversations import ShownConversation

log = get_logger(__name__)
OPEN, CLOSE, BETWEEN = "[[", "]]", "|"  # around what carries loss; between tokens
SHOWN_TOKENS = 400


def words_of(progress: PrepareProgress) -> str:
    """Says how far a `prepare` is, and about how long it will still take."""
    share = "" if progress.share is None else f"{progress.share:.0%}"
    if progress.seconds_left is not None and progress.seconds > 2:
        share += f", about {about(progress.seconds_left)} left"
    if progress.doing == "counting":
        return f"counting the documents for --fill-in-the-middle: {progress.documents:,} ({share})"
    if progress.doing == "joining":
        return f"joining the encoded parts: {progress.parts_done:,} of {progress.part_count:,}"
    rate = progress.tokens / max(progress.seconds, 1e-9)
    known = f"{share}: " if share else ""
    return f"{known}{progress.documents:,} documents, {progress.tokens:,} tokens, {rate:,.0f} tokens/s"


def print_conversations(conversations: Iterable[ShownConversation]) -> None:
    """Prints conversations; what carries loss stands in brackets, and in colour where the terminal has some."""
    from rich.text import Text

    to, number = console(), 0
    for number, conversation in enumerate(conversations, 1):  # noqa: B007  counted
        trained = conversation.count(has_loss=True)
        say(f"{conversation.where}: {conversation.count():,} tokens, {trained:,} of them carry loss")
        text = Text()
        for run in conversation.runs:
            style = "bold green" if run.has_loss else "dim"
            text.append(visible(f"{OPEN}{run.text}{CLOSE}" if run.has_loss else run.text), style)
        to.print(text)
        tokens, left = Text("tokens: "), SHOWN_TOKENS
        for run in conversation.runs:
            in_one_line = (token.replace("\n", "\\n").replace("\t", "\\t") for token in run.tokens[: max(0, left)])
            shown = BETWEEN.join(map(visible, in_one_line))
            if shown:
                tokens.append(f"{OPEN}{shown}{CLOSE}" if run.has_loss else shown, "green" if run.has_loss else "dim")
            left -= len(run.tokens)
        if left < 0:
            tokens.append(f" and {-left:,} more")
        to.print(tokens)
        say("")
    say(f"{plural(number, 'conversation')}; what carries loss is in {OPEN} {CLOSE}; nothing was written")


def print_summary(summary: PrepareSummary) -> None:
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
    counts = f"{plural(summary.document_count, 'document')}, {plural(summary.token_count, 'token')}"
    if summary.loss_token_count is not None:
        counts += f" ({summary.loss_token_count:,} carry loss, {summary.loss_token_count / summary.token_count:.1%})"
    if summary.skipped_rows:
        first = f"; the first: {summary.first_skipped[0]}" if summary.first_skipped else ""
        listed = f", listed in {summary.left_out}" if summary.left_out else ""
        log.warning(f"{plural(summary.skipped_rows, 'bad row')} left out{listed}{first}")
    say(f"{summary.output}.bin: {counts}, vocabulary {summary.vocab_size:,}, {done}")
    if log.isEnabledFor(logging.INFO):  # not with --quiet
        say(
            f"next: megalite train CONFIG.yaml {quote(f'data.path={summary.output}')} "
            "(`megalite config init` writes a config; for one with data.sources add data.sources={})"
        )
