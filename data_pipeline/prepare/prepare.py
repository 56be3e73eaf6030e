"""Encodes text sources with a tokenizer into OUTPUT.bin, OUTPUT.idx and OUTPUT.meta.json.

The pieces of all sources are grouped into chunks by a fixed rule; worker processes encode chunks into part
files (parts.py); the parts are concatenated in order. After a kill at any moment, a rerun of the same
job skips the finished parts and writes the same bytes. A job that is already done is recognised and
costs nothing; the output of another job is replaced only if that is asked for (existing.py). Memory: about
2 chunks of text per worker, and 4 bytes per document.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from data_pipeline.chat.encoder import ChatEncoder
from data_pipeline.errors import DataError, first_names
from data_pipeline.indexed import IndexedTokens, IndexedWriter, token_dtype
from data_pipeline.loss_file import LossWriter, loss_path
from data_pipeline.meta import CorpusMeta, meta_path, read_meta
from data_pipeline.prepare.bad_rows import BadRows
from data_pipeline.prepare.cutting import TextPiece
from data_pipeline.prepare.encoder_check import fast_encoder
from data_pipeline.prepare.encoding import TextEncoder
from data_pipeline.prepare.existing import check_replaceable
from data_pipeline.prepare.parts import PartSize, PartStore, encode_part, exit_with_parent, holding_back_interrupts
from data_pipeline.prepare.plan import USUAL_OPTIONS, PreparationPlan, PrepareOptions, chunks, plan_job
from data_pipeline.sources.folders import repeated_files
from data_pipeline.tokenizer import TrainedTokenizer


@dataclass(frozen=True)
class PrepareProgress:
    """Counts of this run; parts of an earlier run are in `parts_done` only."""

    parts_done: int
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
    dry_run: bool = False,
) -> PrepareSummary:
    """Encodes `sources` into OUTPUT.bin, OUTPUT.idx and OUTPUT.meta.json; `workers` defaults to all cores.

    A tokenizer that has just been trained is written first. Raises DataError, before anything is written, if a source
    or the tokenizer is missing, or if the output holds other data and `overwrite` is not set.
    """
    started = time.monotonic()
    if workers is not None and workers < 1:
        raise DataError(f"{workers} workers cannot encode anything: ask for at least 1, or leave it out for all cores")
    trained = tokenizer if isinstance(tokenizer, TrainedTokenizer) else None
    job = plan_job(sources, tokenizer, options)
    workers = _useful_workers(workers, job)
    store, bad_rows = PartStore(output, job.parts_sha256), BadRows(options.skip_bad_rows)
    meta = _finished(output, job)
    reused, discarded = meta is not None, 0
    resumed = set() if reused else store.finished(lacking_rows=options.skip_bad_rows)
    if dry_run:
        check_replaceable(output, job, overwrite)
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
            discarded, resumed = store.begin(), store.finished(lacking_rows=options.skip_bad_rows)
            part_count = _encode_missing(job, store, resumed, workers, bad_rows, progress, started)
            meta = _merge(job, store, part_count, bad_rows.count, output)
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
        first_skipped=bad_rows.first,
        repeated=repeated_files(source.path for source in job.sources if source.path is not None),
    )


def _useful_workers(asked: int | None, job: PreparationPlan) -> int:
    """Returns the number of worker processes: all usable cores by default, but no more than chunks."""
    workers = asked or len(os.sched_getaffinity(0))
    if job.source_bytes is None:
        return workers
    return max(1, min(workers, job.source_bytes // job.chunk_characters))


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


def _encode_missing(
    job: PreparationPlan,
    store: PartStore,
    finished: set[int],
    workers: int,
    bad_rows: BadRows,
    progress: Callable[[PrepareProgress], None] | None,
    started: float,
) -> int:
    """Encodes every chunk that has no part yet; returns the number of parts."""
    part_count = documents = tokens = 0

    def missing() -> Iterator[tuple[Path, list[TextPiece]]]:
        nonlocal part_count
        for number, chunk in enumerate(chunks(job, bad_rows)):
            part_count = number + 1
            if number not in finished:
                yield store.path(number), chunk

    for parts_done, size in enumerate(_encoded(job, missing(), workers), start=len(finished) + 1):
        documents, tokens = documents + size.documents, tokens + size.tokens
        bad_rows.first += size.first_bad_rows
        if progress is not None:
            progress(PrepareProgress(parts_done, documents, tokens, time.monotonic() - started))
    if part_count == 0:
        hold = "holds" if len(job.specs) == 1 else "hold"
        raise DataError(f"{first_names(job.specs)} {hold} no text at all: give at least one document with text")
    return part_count


def _encoded(job: PreparationPlan, chunks: Iterator[tuple[Path, list[TextPiece]]], workers: int) -> Iterator[PartSize]:
    """Encodes chunks into parts and yields the parts' sizes as they are done.

    At most two chunks per worker process are on their way, so memory does not grow with the corpus; one worker is this
    process.
    """
    skip = job.options.skip_bad_rows
    if workers == 1:
        for path, chunk in chunks:
            yield encode_part(job.encoder, chunk, BadRows(skip), path)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=exit_with_parent)
    pending: set[Future[PartSize]] = set()
    try:
        for path, chunk in chunks:
            with holding_back_interrupts():
                pending.add(pool.submit(encode_part, job.encoder, chunk, BadRows(skip), path))
            if len(pending) == 2 * workers:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in as_completed(pending))
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process of prepare died (out of memory, or started from a script without "
            '`if __name__ == "__main__":`): run it again with fewer --workers, finished parts are kept'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _merge(job: PreparationPlan, store: PartStore, part_count: int, skipped_rows: int, output: Path) -> CorpusMeta:
    """Concatenates the parts. The old metadata is removed first and the new written last, so that it is never wrong."""
    refused, first = store.refused_documents(part_count), 0
    skipped_rows += len(refused)
    writer = IndexedWriter(output, token_dtype(job.tokenizer.vocab_size))
    chats = job.encoder if isinstance(job.encoder, ChatEncoder) else None
    is_fast = isinstance(job.encoder, TextEncoder) and job.encoder.fast_except is not None
    mask = LossWriter(output) if chats else None
    try:
        with writer, mask or nullcontext():
            for number in range(part_count):
                part = store.read(number)
                documents = len(part.document_ends)
                part = part.without({document - first for document in refused})
                first += documents
                writer.append(part.tokens, part.document_ends)
                skipped_rows += part.bad_rows
                if mask is not None:
                    mask.append(part.loss)
            if not writer.document_count:
                raise DataError(f"{first_names(job.specs)}: none of the {skipped_rows:,} rows can be used")
            meta_path(output).unlink(missing_ok=True)
            loss_path(output).unlink(missing_ok=True)
    except OSError as error:
        error.filename = error.filename or f"{output}.bin"  # a full disk is reported without a name
        raise
    meta = CorpusMeta(
        tokenizer_sha256=job.tokenizer.sha256,
        tokenizer=job.tokenizer.given,
        vocab_size=job.tokenizer.vocab_size,
        eos_token_id=job.tokenizer.eos_token_id,
        token_count=writer.token_count,
        document_count=writer.document_count,
        dtype=str(writer.dtype),
        sha256=writer.bin_sha256,
        idx_sha256=writer.idx_sha256,
        sources=job.specs,
        job_sha256=job.sha256,
        text_field=job.options.text_field,
        append_eos=job.options.append_eos,
        loss_sha256=mask.sha256 if mask else None,
        train_on=chats.train_on if chats else None,
        chat_template_sha256=chats.template.digest() if chats else None,
        begin_token_id=job.encoder.begin_token,
        special_tokens=job.options.special_tokens,
        fill_in_the_middle=job.options.fill_in_the_middle,
        skipped_rows=skipped_rows,
        tokenizers=version("tokenizers"),
        gigatoken=version("gigatoken") if is_fast else None,
    )
    meta.write(output)
    return meta
