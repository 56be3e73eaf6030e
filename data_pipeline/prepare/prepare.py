"""Encodes text sources with a tokenizer into OUTPUT.bin, OUTPUT.idx and OUTPUT.meta.json.

All sources are cut into units by a fixed rule (units.py); worker processes read units and encode them into part files
(workers.py, parts.py), which are joined in order (joining.py). After a kill at any moment, a rerun of the same job does
not read the finished units, and writes the same bytes. A job that is already done is recognised and costs nothing; the
output of another job is replaced only if that is asked for (overwrite_check.py). Memory: a piece of text per worker,
and 4 bytes per document.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Literal

from data_pipeline.chat.encoder import ChatEncoder
from data_pipeline.encoding.encoders import TextEncoder
from data_pipeline.errors import DataError
from data_pipeline.prepare.encoder_check import fast_encoder
from data_pipeline.prepare.joining import join_parts
from data_pipeline.prepare.overwrite_check import check_replaceable
from data_pipeline.prepare.parts import PartStore
from data_pipeline.prepare.plan import USUAL_OPTIONS, PreparationPlan, PrepareOptions, plan_job
from data_pipeline.prepare.units import undivided_files
from data_pipeline.prepare.workers import TaskDone, UnitTask, UnitWork, units_done
from data_pipeline.sources.folders import repeated_files
from data_pipeline.sources.json_rows import begins_with_row
from data_pipeline.sources.lines import numbered_from_the_first
from data_pipeline.sources.text import TextFile
from data_pipeline.storage.file_io import write_atomically
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import token_dtype
from data_pipeline.storage.meta import CorpusMeta, read_meta
from data_pipeline.storage.paths import decimal_size, with_ending
from data_pipeline.tokenizers.training import TrainedTokenizer

_BYTES_OF_A_TOKEN = 4  # of text, before it is known
_SHOWN_ROWS = 3  # of the bad ones, in the summary
_LOOKED_AT = 64  # files of text that may be rows


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of a run; parts of an earlier run are in `parts_done` only."""

    doing: Literal["counting", "encoding", "joining"]
    parts_done: int
    part_count: int
    documents: int
    tokens: int
    seconds: float
    share: float | None = None  # of the work, by the sizes of the text; None if they are not known
    seconds_left: float | None = None


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
    left_out: Path | None  # the file that lists them
    loss_token_count: int | None  # of conversations: tokens that carry loss
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
    must wait, and about a chat template, before anything is encoded. Raises DataError, before anything is written, if a
    source or the tokenizer is missing, or if the output holds other data and `overwrite` is not set.
    """
    started = time.monotonic()
    if workers is not None and workers < 1:
        raise DataError(f"{workers} workers cannot encode anything: ask for at least 1, or leave it out for all cores")
    trained = tokenizer if isinstance(tokenizer, TrainedTokenizer) else None
    job = plan_job(sources, tokenizer, options)
    workers = workers or len(os.sched_getaffinity(0))
    if job.source_bytes is not None:  # a unit of text for each
        workers = max(1, min(workers, job.source_bytes // job.unit_bytes))
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
                if isinstance(job.encoder, ChatEncoder) and job.encoder.notice:
                    notice(job.encoder.notice)
                _announce_rows(job, notice)
                _announce_waiting(job, workers, notice)
                _announce_full_disk(job, store, notice)
            workers = min(workers, len(job.units))
            sizes = [sum(stretch.size_bytes for _, stretch in unit) for unit in job.units]
            reporter = _Reporter(progress, sizes, workers, started)
            with _full_disk_explained(output):
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
        left_out=left_out_path(output) if meta and left_out_path(output).exists() else None,
        loss_token_count=meta.loss_token_count if meta else None,
        repeated=repeated_files(source.path for source in job.sources if source.path is not None),
    )


def _announce_rows(job: PreparationPlan, notice: Callable[[str], None]) -> None:
    texts = [source.path for source in job.sources if isinstance(source, TextFile) and isinstance(source.path, Path)]
    if found := [str(path) for path in texts[:_LOOKED_AT] if begins_with_row(path)]:
        notice(
            f"{', '.join(found[:_SHOWN_ROWS])}: a file of text is one document, but the first line is a JSON object: "
            f"name the file .jsonl if each line holds a document in its field {job.options.text_field or 'text'!r}"
        )


def _announce_waiting(job: PreparationPlan, workers: int, notice: Callable[[str], None]) -> None:
    for path in undivided_files(job.sources, job.units, workers):
        notice(
            f"{path} is read by one process, and from its beginning after a kill, because no process can begin inside "
            f"it: cut it into several files to use {workers}"
        )


def _announce_full_disk(job: PreparationPlan, store: PartStore, notice: Callable[[str], None]) -> None:
    """Says so if the tokens will probably not fit on the disk: parts and output are there at the same time."""
    text = sum(stretch.size_bytes for unit in job.units for _, stretch in unit)
    each = token_dtype(job.tokenizer.vocab_size).itemsize + (job.options.train_on is not None)
    needed, free = round(2 * each * text / _BYTES_OF_A_TOKEN), shutil.disk_usage(store.folder).free
    needed -= sum(file.stat().st_size for file in store.folder.iterdir())
    if needed > free:
        notice(
            f"the text has {decimal_size(text)}, whose tokens take about {decimal_size(needed)} more until they are "
            f"joined, and half of that then, but {decimal_size(free)} are free where {store.output} is: free some "
            "space, or choose another output"
        )


@contextmanager
def _full_disk_explained(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{error.filename or output}: the disk is full: free some space and give the same command, which goes on: "
            "finished parts are kept"
        ) from error


def _finished(output: Path, job: PreparationPlan) -> CorpusMeta | None:
    """Returns the metadata of a complete output of this job, or None; one without bad rows is that of any choice."""
    try:
        meta = read_meta(output)
        if meta is None or meta.job_sha256 != job.job_sha256 or (meta.skipped_rows and not job.options.skip_bad_rows):
            return None
        tokens = IndexedTokens(output)
        tokens.check()
    except DataError:
        return None  # damaged: made again
    promised = (meta.token_count, meta.document_count, meta.loss_sha256 is not None)
    return meta if (tokens.token_count, len(tokens), tokens.has_loss_mask) == promised else None


class _Reporter:
    """Adds up what has been done, and tells the caller of `prepare`.

    How much of the text is encoded follows from the sizes of the units that are, and, of those under way, from their
    tokens, which are as long as those of the others.
    """

    def __init__(
        self, tell: Callable[[PrepareProgress], None] | None, sizes: list[int], workers: int, started: float
    ) -> None:
        self._tell, self._sizes, self._started = tell, sizes, started
        self._most_under_way = 0.9 * workers * sum(sizes) / max(1, len(sizes))

    def begin(self, doing: Literal["counting", "encoding", "joining"], parts_done: Collection[int] = ()) -> None:
        self._doing, self._parts_done, self._documents, self._tokens = doing, len(parts_done), 0, 0
        self._kept_bytes = sum(self._sizes[number] for number in parts_done)
        self._done_bytes = self._done_tokens = 0
        self._began = time.monotonic()

    def finish(self, done: TaskDone) -> None:
        """Notes a unit with which everything is done."""
        self._done_bytes += self._sizes[done.number]
        self._done_tokens += done.tokens
        self.add(0, 0, parts=1)

    def add(self, documents: int, tokens: int, parts: int = 0) -> None:
        self._documents += documents
        self._tokens += tokens
        self._parts_done += parts
        if self._tell is not None:
            now = time.monotonic()
            counts = self._parts_done, len(self._sizes), self._documents, self._tokens
            self._tell(PrepareProgress(self._doing, *counts, now - self._started, *self._outlook(now - self._began)))

    def _outlook(self, seconds: float) -> tuple[float | None, float | None]:
        """Returns the share of the work that is done, and the seconds that are left; None where that is not known."""
        whole, each = sum(self._sizes), float(_BYTES_OF_A_TOKEN)
        if self._doing == "joining" or not whole:
            return self._parts_done / max(1, len(self._sizes)), None
        if self._done_tokens and self._done_bytes:
            each = self._done_bytes / self._done_tokens
        under_way = min((self._tokens - self._done_tokens) * each, self._most_under_way)
        mine = max(self._done_bytes, min(self._done_bytes + under_way, 0.99 * (whole - self._kept_bytes)))
        left = whole - self._kept_bytes - mine
        return (self._kept_bytes + mine) / whole, left / mine * seconds if mine else None


def _encode_missing(work: UnitWork, finished: set[int], workers: int, reporter: _Reporter) -> None:
    """Encodes every unit that has no part yet."""
    try:
        first_documents = _first_documents(work, workers, reporter)
        reporter.begin("encoding", finished)
        tasks = (UnitTask(number, first) for number, first in enumerate(first_documents) if number not in finished)
        for done in units_done(work, tasks, workers, reporter.add):
            reporter.finish(done)
    except DataError as error:
        raise DataError(*numbered_from_the_first([str(error)])) from error


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
        counts = [0] * count
        tasks = (UnitTask(number, 0, only_count=True) for number in range(count))
        for done in units_done(work, tasks, workers, reporter.add):
            counts[done.number] = done.documents
            reporter.finish(done)
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
        job_sha256=job.job_sha256,
        text_field=job.options.text_field,
        append_eos=job.options.append_eos,
        loss_sha256=joined.loss_sha256,
        loss_token_count=joined.loss_token_count,
        train_on=chats.train_on if chats else None,
        chat_template_sha256=chats.template.digest() if chats else None,
        end_of_turn_id=chats.end_of_turn if chats else None,
        begin_token_id=job.encoder.begin_token,
        special_tokens=job.options.special_tokens,
        fill_in_the_middle=job.options.fill_in_the_middle,
        skipped_rows=joined.bad_rows,
        tokenizer_files=True,
        tokenizers=version("tokenizers"),
        gigatoken=version("gigatoken") if is_fast else None,
    )
    listed = numbered_from_the_first(joined.first_bad_rows)
    left_out_path(store.output).unlink(missing_ok=True)
    if listed:
        more = [f"and {joined.bad_rows - len(listed):,} more"] if joined.bad_rows > len(listed) else []
        write_atomically(left_out_path(store.output), "\n".join([*listed, *more, ""]).encode("utf-8", "replace"))
    meta.write(store.output)
    return meta, listed[:_SHOWN_ROWS]


def left_out_path(output: Path) -> Path:
    """Returns the path of the list of bad rows that an output lacks."""
    return with_ending(output, ".left_out.txt")
