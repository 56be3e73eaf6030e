"""The commands `megalite data plan|at|find|check|pack|fetch`, about prepared data and what a run reads of it.

Exit codes: 0 done; 1 a check has found something wrong; 2 user error. No torch.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.cli.checkpoint import advancing
from launch.cli.options import AsJson, ConfigPath, Overrides
from launch.errors import VERIFY_FAILED_CODE, LaunchError
from launch.output import Table, check_local, print_json, spinner
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.trainer.start.run_config import load_run_config
from megalite.units import plural

if TYPE_CHECKING:
    from launch.trainer.data.packing import PackedSplit

log = get_logger(__name__)

data_app = typer.Typer(no_args_is_help=True)
RunFolder = Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN_DIR")]


@data_app.command("plan")
def plan_data(config_path: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print what a run is going to read: samples, tokens and epochs of each source, stage by stage, and what repeats.

    A run that has checkpoints goes on from the newest one. Exit code 2 if a source would be read more often than its
    max_epochs.

    Example: `megalite data plan configs/quickstart.yaml training.steps=1000`
    """
    from launch.inspection.data_plan import data_of, plan_table, planned_sources
    from launch.trainer.data.run_mix import check_epochs, notices_of
    from launch.trainer.start.resume import checkpoints_of
    from megalite.config.batch_stage_text import format_stage, stage_facts

    config = load_run_config(config_path, overrides or [])
    data = data_of(config, checkpoints_of(config))
    rows = list(planned_sources(data))
    notices = list(notices_of(data.config, data.samples, data.followed)) if config.data.sources else []
    if as_json:
        length = {"steps": data.config.total_steps, "samples": data.stop}
        stages = {"stages": [asdict(row) for row in rows], "batch_stages": stage_facts(data.config)}
        print_json({**length, **stages, "notices": notices})
    else:
        plan_table(rows, ", ".join(config.data.prefixes)).print()
        for stage in stage_facts(data.config):
            say(format_stage(stage))
        for notice in notices:
            say(notice)
    if config.data.sources:
        check_epochs(data.config, data.samples, data.followed)


@data_app.command()
def at(
    run_dir: RunFolder,
    step: Annotated[int, typer.Option(min=1, help="Number of the step, from 1; done, or to come.")],
    text: Annotated[bool, typer.Option("--text", help="Print the text of every sample, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a step of a run has read: source, epoch, documents and, with --text, the text of every sample.

    Example: `megalite data at runs/quickstart --step 100 --text`
    """
    from launch.inspection.data_audit import MEANINGS, AuditedRun

    run = AuditedRun.open(run_dir)
    samples = run.samples_of(step)
    contents = [(content, run.text_of(content.k) if text else None) for content in run.contents(samples)]
    if as_json:
        rows = [
            {
                "sample": content.k,
                "source": content.source or None,
                "epoch": content.epoch,
                "documents": [asdict(document) for document in content.documents],
                **({"text": written} if text else {}),
            }
            for content, written in contents
        ]
        print_json({"step": step, "when": samples.when, "samples": rows, "notice": run.notice})
        return
    say(f"step {step:,}: samples {samples.first:,} to {samples.stop - 1:,}, {MEANINGS[samples.when]}")
    lines = [
        [", ".join(map(str, content.documents)), content.source, f"{content.k:,}", f"{content.epoch:,}"]
        for content, _ in contents
    ]
    Table(["documents", "source", "sample", "epoch"], lines, text_columns=(0, 1)).print()
    for content, written in contents if text else ():
        say(f"--- sample {content.k:,}", written or "", sep="\n")
    if run.notice:
        say(run.notice)


@data_app.command()
def find(
    run_dir: RunFolder,
    document: Annotated[
        str,
        typer.Option(
            help="A source or a prefix, and the number of a document in it.", metavar="SOURCE_OR_PREFIX:NUMBER"
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Print the steps of a run, done and to come, that read a document, in all epochs; it scans nothing.

    Example: `megalite data find runs/quickstart --document runs/quickstart/data/python_stdlib:17`
    """
    from launch.inspection.data_audit import MEANINGS, AuditedRun

    run = AuditedRun.open(run_dir)
    readings = run.readings(document)
    if as_json:
        print_json(
            {
                "document": document,
                "samples": [asdict(reading) | {"source": reading.source or None} for reading in readings],
                "notice": run.notice,
            }
        )
        return
    if not readings:
        skipped = ", left out by data.too_long skip" if run.data.config.data.too_long == "skip" else ""
        say(f"no step of the run reads {document}: it is held out, empty{skipped}, or comes after the end of the run")
    lines = [
        [
            MEANINGS[reading.when],
            reading.source,
            "" if reading.step is None else f"{reading.step:,}",
            f"{reading.k:,}",
            f"{reading.epoch:,}",
        ]
        for reading in readings
    ]
    if lines:
        Table(["when", "source", "step", "sample", "epoch"], lines, text_columns=(0, 1)).print()
    if run.notice:
        say(run.notice)


@data_app.command()
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
        documents, tokens = plural(each.document_count, "document"), plural(each.token_count, "token")
        counts = f"{documents}, {tokens}, the largest id {each.largest_id:,}"
        against = "" if each.has_metadata else "; it has no metadata, so its bytes were held against no digest"
        if not each.has_metadata and vocab_size is None:
            against += ", and its ids against no vocabulary (--vocab-size)"
        say(*(each.problems or [f"{each.prefix}: {counts}, nothing wrong{against}"]), sep="\n")
    if not passed:
        raise typer.Exit(VERIFY_FAILED_CODE)


@data_app.command()
def pack(config_path: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Compute which documents share a sample, for a run with `data.packing: best_fit`.

    The plan of each split is written beside the token files, or into data.cache where these may not be written, and
    computed again only where they, the sequence length or the held-out fraction have changed. Ranks read of it what
    their samples need. Samples without any token that carries loss are counted, and refused if there are no others.

    Example: `megalite data pack configs/quickstart.yaml data.packing=best_fit data.document_mask=true`
    """
    from launch.trainer.data.opening import open_texts
    from launch.trainer.data.packing import pack_data
    from launch.trainer.data.remote_data import find_or_fetch_copies, with_copies
    from launch.trainer.loss_targets import notices_of_targets

    config = load_run_config(config_path, overrides or [], needs_length=False)
    with spinner("packing", is_shown=not as_json) as describe:
        places = find_or_fetch_copies(config.data, config.training.sequence_length, may_fetch=True, tell=describe)
        here = config.model_copy(update={"data": with_copies(config.data, places)})
        packed = pack_data(here, describe)
    if as_json:
        print_json([asdict(each) for each in packed])
    else:
        _print_table(packed)
    for notice in notices_of_targets(open_texts(here, config.training.sequence_length), config.data.too_long):
        log.warning(notice)


def _print_table(packed: list[PackedSplit]) -> None:
    rows = [
        (
            str(each.prefix),
            each.split,
            f"{each.tokens:,}",
            f"{each.pieces:,}",
            f"{each.samples:,}",
            "-" if each.filled is None else f"{each.filled:.3%}",
            "already packed" if each.is_reused else "packed",
        )
        for each in packed
    ]
    columns = ("data", "split", "tokens", "pieces", "samples", "filled", "plan")
    Table(columns, rows, text_columns=(0, 1, 6)).print()


@data_app.command()
def fetch(config_path: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Copy the data of a run that lies at URLs to this host, into `data.cache`, and compare every digest.

    A run does it by itself, while its accelerators wait. Where all hosts share `data.cache`, one of them is enough.
    What is there already is not copied again.

    Example: `megalite data fetch configs/far.yaml data.path=s3://bucket/corpora/web`
    """
    from launch.trainer.data.remote_data import find_or_fetch_copies

    config = load_run_config(config_path, overrides or [])
    if not config.data.urls:
        raise LaunchError(f"{config_path} names no data at a URL, so that there is nothing to copy: start the run")
    with spinner("looking for the data", is_shown=not as_json) as describe:
        places = find_or_fetch_copies(config.data, config.training.sequence_length, may_fetch=True, tell=describe)
    if as_json:
        print_json(places)
        return
    for url, prefix in places.items():
        say(f"{url} is copied to {prefix}, and its digests are right")
