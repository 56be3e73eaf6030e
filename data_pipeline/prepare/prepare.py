"""Encodes text sources with a tokenizer into OUTPUT.bin, OUTPUT.idx and OUTPUT.meta.json.

All sources are cut into units by a fixed rule (units.py); worker processes read units and encode them into part files
(workers.py, parts.py), which are joined in order (joining.py). After a kill at any moment, a rerun of the same job does
not read the finished units, and writes the same bytes. A job that is already done is recognised and costs nothing; the
output of another job is replaced only if that is asked for (existing.py). Memory: a piece of text per worker, and 4
bytes per document.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Literal

from data_pipeline.chat.encoder import ChatEncoder
from data_pipeline.errors import DataError
from data_pipeline.indexed import IndexedTokens, token_dtype
from data_pipeline.meta import CorpusMeta, read_meta
from data_pipeline.prepare.encoder_check import fast_encoder
from data_pipeline.prepare.encoding import TextEncoder
from data_pipeline.prepare.existing import check_replaceable
from data_pipeline.prepare.joining import join_parts
from data_pipeline.prepare.parts import PartStore
from data_pipeline.prepare.plan import USUAL_OPTIONS, PreparationPlan, PrepareOptions, plan_job
from data_pipeline.prepare.units import undivided_files
from data_pipeline.prepare.workers import UnitTask, UnitWork, units_done
from data_pipeline.sources.folders import repeated_files
from data_pipeline.sources.lines import numbered_from_the_first
from data_pipeline.tokenizer import TrainedTokenizer


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of a run; parts of an earlier run are in `parts_done` only."""

    doing: Literal["counting", "encoding", "joining"]
    parts_done: int
    part_count: int
    documents: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class PrepareSummary:
    """The result of `prepare`; a dry run encodes nothing and counts 0 tokens unless the output exists already."""

    output: Path
    reused: bool  # an identical output existed, nothing was done
    dry_run: bool
    source_count: int
    source_bytes: int | None
    vocab_size: int
    eos_token_id: int | None
    dtype: str
    token_count: int
    document_count: int
    sha256: str  # of OUTPUT.bin; empty in a dry run
    resumed_parts: int  # parts that an earlier, unfinished run had left
    discarded_parts: int  # those of an unfinished run of another job
    workers: int
    seconds: float
    skipped_rows: int  # that held no document
    first_skipped: list[str]  # sentences about some of them
    repeated: list[list[str]]  # names of each file that is read more than once


def prepare(
    sources: list[str],
    output: Path,
    tokenizer: Path | TrainedTokenizer,
    options: PrepareOptions = USUAL_OPTIONS,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Callable[[PrepareProgress], None] | None = None,
    notice: Callable[[str], None] | None = None,
    dry_run: bool = False,
) -> PrepareSummary:
    """Encodes `sources` into OUTPUT.bin, OUTPUT.idx and OUTPUT.meta.json; `workers` defaults to all cores.

    A tokenizer that has just been trained is written first. `notice` takes a sentence about each file for which workers
    must wait, before anything is encoded. Raises DataError, before anything is written, if a source
    or the tokenizer is missing, or if the output holds other data and `overwrite` is not set.
    """
    started = time.monotonic()
    if workers is not None and workers < 1:
        raise DataError(f"{workers} workers cannot encode anything: ask for at least 1, or leave it out for all cores")
    trained = tokenizer if isinstance(tokenizer, TrainedTokenizer) else None
    job = plan_job(sources, tokenizer, options)
    workers = _useful_workers(workers, job)
    store = PartStore(output, job.parts_sha256)
    meta = _finished(output, job)
    reused, discarded, first_skipped = meta is not None, 0, list[str]()
    resumed = set[int]()
    if dry_run:
        check_replaceable(output, job, overwrite)
        resumed = resumed if reused else store.finished(lacking_rows=options.keeps_lacking)
    elif meta is not None:
        if trained is not None:
            trained.write()
        store.remove_own()
    else:
        with store.locked():
            check_replaceable(output, job, overwrite)
            if trained is not None:
                trained.write()
            if isinstance(job.encoder, TextEncoder) and options.encoder == "fast":
                job = replace(job, encoder=fast_encoder(job.encoder, job.sources))
            discarded, resumed = store.begin(), store.finished(lacking_rows=options.keeps_lacking)
            if notice is not None:
                _announce_waiting(job, workers, notice)
            workers = min(workers, len(job.units))
            reporter = _Reporter(progress, len(job.units), started)
            _encode_missing(UnitWork(job, store), resumed, workers, reporter)
            meta, first_skipped = _merge(job, store, reporter)
            store.remove()
    return PrepareSummary(
        output=output,
        reused=reused,
        dry_run=dry_run,
        source_count=len(job.sources),
        source_bytes=job.source_bytes,
        vocab_size=job.tokenizer.vocab_size,
        eos_token_id=job.tokenizer.eos_token_id,
        dtype=str(token_dtype(job.tokenizer.vocab_size)),
        token_count=meta.token_count if meta else 0,
        document_count=meta.document_count if meta else 0,
        sha256=meta.sha256 if meta else "",
        resumed_parts=len(resumed),
        discarded_parts=discarded,
        workers=workers,
        seconds=time.monotonic() - started,
        skipped_rows=meta.skipped_rows if meta else 0,
        first_skipped=first_skipped,
        repeated=repeated_files(source.path for source in job.sources if source.path is not None),
    )


def _useful_workers(asked: int | None, job: PreparationPlan) -> int:
    """Returns the number of worker processes: all usable cores by default, but a unit of text for each."""
    workers = asked or len(os.sched_getaffinity(0))
    if job.source_bytes is None:
        return workers
    return max(1, min(workers, job.source_bytes // job.unit_bytes))


def _announce_waiting(job: PreparationPlan, workers: int, notice: Callable[[str], None]) -> None:
    for path in undivided_files(job.sources, job.units, workers):
        notice(
            f"{path} is read by one process, and from its beginning after a kill, because no process can begin inside "
            f"it: cut it into several files to use {workers}"
        )


def _finished(output: Path, job: PreparationPlan) -> CorpusMeta | None:
    """Returns the metadata of a complete output of this job, or None; one without bad rows is that of any choice."""
    try:
        meta = read_meta(output)
        if meta is None or meta.job_sha256 != job.sha256 or (meta.skipped_rows and not job.options.skip_bad_rows):
            return None
        tokens = IndexedTokens(output)
        tokens.check()
    except DataError:
        return None  # damaged: made again
    promised = (meta.token_count, meta.document_count, meta.loss_sha256 is not None)
    return meta if (tokens.token_count, len(tokens), tokens.has_loss_mask) == promised else None


class _Reporter:
    """Adds up what has been done, and tells the caller of `prepare`."""

    def __init__(self, tell: Callable[[PrepareProgress], None] | None, part_count: int, started: float) -> None:
        self._tell, self._part_count, self._started = tell, part_count, started

    def begin(self, doing: Literal["counting", "encoding", "joining"], parts_done: int = 0) -> None:
        self._doing, self._parts_done, self._documents, self._tokens = doing, parts_done, 0, 0

    def add(self, documents: int, tokens: int, parts: int = 0) -> None:
        self._documents += documents
        self._tokens += tokens
        self._parts_done += parts
        if self._tell is not None:
            seconds = time.monotonic() - self._started
            counts = self._parts_done, self._part_count, self._documents, self._tokens
            self._tell(PrepareProgress(self._doing, *counts, seconds))


def _encode_missing(work: UnitWork, finished: set[int], workers: int, reporter: _Reporter) -> None:
    """Encodes every unit that has no part yet."""
    first_documents = _first_documents(work, workers, reporter)
    reporter.begin("encoding", len(finished))
    tasks = (UnitTask(number, first) for number, first in enumerate(first_documents) if number not in finished)
    try:
        for _ in units_done(work, tasks, workers, reporter.add):
            reporter.add(0, 0, parts=1)
    except DataError as error:
        raise DataError(numbered_from_the_first(str(error))) from error


def _first_documents(work: UnitWork, workers: int, reporter: _Reporter) -> list[int]:
    """Returns the number of each unit's first document, for fill-in-the-middle: nothing else depends on it.

    The documents of a unit can be counted only by reading it, which takes a hundredth of the time of encoding it. The
    counts are kept, so that a run that goes on reads nothing twice.
    """
    job, count = work.job, len(work.job.units)
    if not job.options.fill_in_the_middle:
        return [0] * count
    counts = work.store.document_counts
    if counts is None or len(counts) != count:
        reporter.begin("counting")
        found = [0] * count
        tasks = (UnitTask(number, 0, only_count=True) for number in range(count))
        try:
            for done in units_done(work, tasks, workers, reporter.add):
                found[done.number] = done.documents
                reporter.add(0, 0, parts=1)
        except DataError as error:
            raise DataError(numbered_from_the_first(str(error))) from error
        counts = found
        work.store.keep_document_counts(counts)
    return list(accumulate(counts[:-1], initial=0))


def _merge(job: PreparationPlan, store: PartStore, reporter: _Reporter) -> tuple[CorpusMeta, list[str]]:
    """Joins the parts. The old metadata is removed first and the new written last, so that it is never wrong.

    Returns the metadata, and sentences about some of the bad rows.
    """
    reporter.begin("joining")
    chats = job.encoder if isinstance(job.encoder, ChatEncoder) else None
    joined = join_parts(
        store,
        len(job.units),
        token_dtype(job.tokenizer.vocab_size),
        job.specs,
        has_loss=chats is not None,
        report=lambda documents, tokens: reporter.add(documents, tokens, parts=1),
    )
    is_fast = isinstance(job.encoder, TextEncoder) and job.encoder.fast_except is not None
    meta = CorpusMeta(
        tokenizer_sha256=job.tokenizer.sha256,
        tokenizer=job.tokenizer.given,
        vocab_size=job.tokenizer.vocab_size,
        eos_token_id=job.tokenizer.eos_token_id,
        token_count=joined.token_count,
        document_count=joined.document_count,
        dtype=str(token_dtype(job.tokenizer.vocab_size)),
        sha256=joined.bin_sha256,
        idx_sha256=joined.idx_sha256,
        sources=job.specs,
        job_sha256=job.sha256,
        text_field=job.options.text_field,
        append_eos=job.options.append_eos,
        loss_sha256=joined.loss_sha256,
        train_on=chats.train_on if chats else None,
        chat_template_sha256=chats.template.digest() if chats else None,
        end_of_turn_id=chats.end_of_turn if chats else None,
        begin_token_id=job.encoder.begin_token,
        special_tokens=job.options.special_tokens,
        fill_in_the_middle=job.options.fill_in_the_middle,
        skipped_rows=joined.bad_rows,
        tokenizers=version("tokenizers"),
        gigatoken=version("gigatoken") if is_fast else None,
    )
    meta.write(store.output)
    return meta, [numbered_from_the_first(sentence) for sentence in joined.first_bad_rows]
