"""The command `megalite data check`: a progress bar and sentences around `data_pipeline.audit.corpus_check`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from launch.cli.checkpoint import advancing
from launch.cli.options import AsJson
from launch.errors import VERIFY_FAILED_CODE
from launch.output import check_local, print_json
from launch.runtime.printing import say
from megalite.units import plural


def check(
    prefixes: Annotated[
        list[Path], typer.Argument(help="Prefixes of prepared data, without .bin or .idx.", metavar="PREFIX...")
    ],
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Ids from here on are wrong, as in model.vocab_size.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of prepared data and hold it against its index and metadata: digests, ids, documents.

    A run reads its data where samples lie and trusts the rest. Exit code 0 only if nothing is wrong, 1 with a sentence
    per problem.

    Example: `megalite data check runs/quickstart/data/python_stdlib`
    """
    from data_pipeline.audit.corpus_check import bytes_to_check, check_corpus

    for prefix in prefixes:
        check_local(prefix, "`megalite data fetch CONFIG` copies what a run reads of it, and compares every digest")
    with advancing("reading", sum(map(bytes_to_check, prefixes))) as advance:
        found = [check_corpus(prefix, advance, vocab_size) for prefix in prefixes]
    passed = not any(each.problems for each in found)
    if as_json:
        print_json({"passed": passed, "corpora": [asdict(each) | {"prefix": str(each.prefix)} for each in found]})
    for each in found if not as_json else ():
        documents, tokens = plural(each.document_count, "document"), f"{each.token_count:,} tokens"
        counts = f"{documents}, {tokens}, the largest id {each.largest_id:,}"
        against = "" if each.has_metadata else "; it has no metadata, so its bytes were held against no digest"
        if not each.has_metadata and vocab_size is None:
            against += ", and its ids against no vocabulary (--vocab-size)"
        say(*(each.problems or [f"{each.prefix}: {counts}, nothing wrong{against}"]), sep="\n")
    if not passed:
        raise typer.Exit(VERIFY_FAILED_CODE)
