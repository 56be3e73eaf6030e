"""Worker processes, each of which reads and encodes units by itself: only numbers travel between them and their parent.

A worker gets the plan once, when it starts, and then numbers of units. How far it is, and whether it is to stop, are in
memory that all processes share, because a unit may take hours: a compressed file is one.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from ctypes import Array, c_char, c_longlong
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock
from typing import NamedTuple

from data_pipeline.chat.encoder import ChatEncoder
from data_pipeline.document import BadRows
from data_pipeline.encoding.cutting import TextPiece
from data_pipeline.encoding.piece_limits import LAST_WORDS, watch_pieces, watched
from data_pipeline.errors import DataError, DataLimitError
from data_pipeline.prepare.parts import PartStore, PartWriter
from data_pipeline.prepare.plan import PreparationPlan
from data_pipeline.prepare.units import unit_pieces
from data_pipeline.storage.indexed_writer import token_dtype
from data_pipeline.tokenizers.reading import UnusableTokenizer

_REPORT_EVERY_S = 0.5

Report = Callable[[int, int], None]
"""Takes the numbers of documents and tokens that were done since the last call."""


class UnitTask(NamedTuple):
    """A unit, and what is to be done with it."""

    number: int
    first_document: int  # the number of its first document in the whole job, where that matters
    only_count: bool = False  # its documents: nothing is encoded


class TaskDone(NamedTuple):
    """A unit with which everything is done."""

    number: int
    documents: int
    tokens: int = 0


class UnitWork(NamedTuple):
    """Everything that is needed for any unit of a job."""

    job: PreparationPlan
    store: PartStore

    def do(self, task: UnitTask, report: Report) -> TaskDone:
        """Counts the documents of a unit, or encodes it into its part. Raises DataError for what cannot be read."""
        bad_rows, timed = BadRows(self.job.options.skip_bad_rows), _TimedReport(report)
        if task.only_count:
            for piece in self._pieces(task, bad_rows, timed):
                timed.add(int(piece.ends_document), 0)
        else:
            self._encode(task, bad_rows, timed)
            timed.flush()
        return TaskDone(task.number, timed.documents, timed.tokens)

    def _encode(self, task: UnitTask, bad_rows: BadRows, timed: "_TimedReport") -> None:
        """Encodes a unit into its part. A document that is refused is a bad row.

        If it has several pieces, others of them may be in other parts: it is marked, and left out when they are joined.
        """
        encoder, refused_pieces = self.job.encoder, 0
        dtype, is_chat = token_dtype(encoder.tokenizer.vocab_size), isinstance(encoder, ChatEncoder)
        with PartWriter(self.store.path(task.number), dtype, has_loss=is_chat) as part:
            for piece in self._pieces(task, bad_rows, timed):
                try:
                    with watched(piece):
                        ids, loss = encoder.encode(piece)
                except UnusableTokenizer as error:
                    raise DataLimitError(f"{piece.where}: {error}") from error
                except DataError as error:
                    bad_rows(error)
                    timed.add(0, 0)
                    if not (piece.begins_document and piece.ends_document):
                        refused_pieces += 1
                        part.refuse_document(ends_document=piece.ends_document)
                else:
                    part.append(ids, loss, ends_document=piece.ends_document)
                    timed.add(int(piece.ends_document), len(ids))
            part.finish(bad_rows.count - refused_pieces, bad_rows.first)

    def _pieces(self, task: UnitTask, bad_rows: BadRows, timed: "_TimedReport") -> Iterator[TextPiece]:
        def on_bad_row(error: DataError) -> None:
            bad_rows(error)
            timed.add(0, 0)  # a file of hours may hold nothing else, and who waits for its end must be heard

        job = self.job
        return unit_pieces(job.sources, job.places, job.units[task.number], task.first_document, on_bad_row)


class _TimedReport:
    """Adds up what is done, and reports it now and then."""

    def __init__(self, report: Report) -> None:
        self._report, self._reported = report, time.monotonic()
        self._pending_documents = self._pending_tokens = self.documents = self.tokens = 0

    def add(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self._pending_documents += documents
        self._pending_tokens += tokens
        self.tokens += tokens
        if time.monotonic() - self._reported > _REPORT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        self._report(self._pending_documents, self._pending_tokens)
        self._pending_documents = self._pending_tokens = 0
        self._reported = time.monotonic()


def units_done(work: UnitWork, tasks: Iterable[UnitTask], workers: int, report: Report) -> Iterator[TaskDone]:
    """Does `tasks`, and yields each when it is done; `report` is called in this process, about every second.

    Ends the workers within a piece of text when the caller stops or an error is raised. One worker is this process,
    unless the rules of the tokenizer may be harmful: only a process that is no longer needed can be kept from going on.
    """
    tokenizer = work.job.encoder.tokenizer
    if workers == 1 and tokenizer.is_harmless:
        for task in tasks:
            yield work.do(task, report)
        return
    context = get_context("spawn" if workers > 1 else "fork")  # one has nothing to wait for but its start
    shared = SharedCounts(context.RawArray("q", 3), context.Lock(), context.RawArray("c", LAST_WORDS))
    pool = ProcessPoolExecutor(workers, context, _start_worker, (work, shared))
    try:
        yield from _of_pool(pool, tasks, 2 * workers, lambda: report(*shared.taken()))
    except BrokenProcessPool as error:
        if why := shared.last_words.value.decode(errors="replace"):
            raise DataLimitError(f"{why}: the tokenizer {tokenizer.given} is not usable") from error
        raise DataError(
            "a worker process of prepare died, mostly because it ran out of memory: run it again with fewer "
            "--workers, finished parts are kept"
        ) from error
    finally:
        shared.values[_STOP] = 1
        pool.shutdown(cancel_futures=True)


def _of_pool(
    pool: ProcessPoolExecutor, tasks: Iterable[UnitTask], most: int, report: Callable[[], None]
) -> Iterator[TaskDone]:
    """Keeps at most `most` tasks waiting or under way, so that memory does not grow with the corpus."""
    tasks = iter(tasks)
    pending: set[Future[TaskDone]] = set()
    while True:
        while len(pending) < most and (task := next(tasks, None)) is not None:
            with _holding_back_interrupts():
                pending.add(pool.submit(_do_in_worker, task))
        if not pending:
            return
        done, pending = wait(pending, _REPORT_EVERY_S, FIRST_COMPLETED)
        report()
        yield from (future.result() for future in done)


_DOCUMENTS, _TOKENS, _STOP = range(3)


class SharedCounts(NamedTuple):
    """Memory of all processes: what the workers have done since it was last taken, and whether they are to stop.

    Nobody waits long for the lock, since a worker that is killed never gives it back; counts are then left as they are.
    """

    values: "Array[c_longlong]"
    lock: Lock
    last_words: "Array[c_char]"  # of a worker that ended itself, a sentence without a remedy

    def add(self, documents: int, tokens: int) -> None:
        if self.lock.acquire(timeout=_REPORT_EVERY_S):
            self.values[_DOCUMENTS] += documents
            self.values[_TOKENS] += tokens
            self.lock.release()
        if self.values[_STOP]:
            raise _StoppedError

    def taken(self) -> tuple[int, int]:
        """Returns the documents and tokens, and begins to count anew."""
        if not self.lock.acquire(timeout=_REPORT_EVERY_S):
            return 0, 0
        documents, tokens = self.values[_DOCUMENTS], self.values[_TOKENS]
        self.values[_DOCUMENTS] = self.values[_TOKENS] = 0
        self.lock.release()
        return documents, tokens


class _StoppedError(Exception):
    """The parent no longer wants what this worker is doing."""


_worker: tuple[UnitWork, SharedCounts]  # what this process was given when it started, if it is a worker


def _start_worker(work: UnitWork, shared: SharedCounts) -> None:
    global _worker
    parent = multiprocessing.parent_process()
    assert parent is not None, "only for worker processes"
    _exit_with(parent)
    work.store.hold_as_worker()
    if not parent.is_alive():  # a later run may have found nobody to wait for
        os._exit(1)
    if not work.job.encoder.tokenizer.is_harmless:
        watch_pieces(shared.last_words)
    _worker = work, shared


def _do_in_worker(task: UnitTask) -> TaskDone:
    work, shared = _worker
    return work.do(task, shared.add)


@contextmanager
def _holding_back_interrupts() -> Iterator[None]:
    """Blocks SIGINT in this process for the `with`, and for ever in the processes that it starts.

    Ctrl-C in a terminal is sent to all of them, and each worker would print a traceback; this process ends them.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _exit_with(parent: BaseProcess) -> None:
    """Ends this worker process when its parent is killed, and leaves Ctrl-C to the parent.

    Otherwise it would wait for work forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait_for_its_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_its_end, daemon=True).start()
