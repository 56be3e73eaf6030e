"""Ends a run that hangs, and explains why.

Every rank watches itself: a thread compares the age of its current span of work (a step, an evaluation, a blocked
save) with a limit learned from those that ended. The first rank that exceeds its limit writes its last records and the
stacks of its threads into `run_dir/hang/LAUNCH`; ranks that see this folder do the same. The lowest rank that answered
explains which rank waits for which, and all exit with one code. The ranks communicate by files only, because what hangs
is their network, or one of them. The storage may hang too: the thread that decides touches no file before it has
started the timer that ends the process in any case.

The thread runs while the main one is stuck in a collective, which releases the interpreter lock. If something holds
that lock, the rank cannot answer or exit: its stacks are still written (rank_registry.py), the other ranks name it and
exit, and the process that started the ranks ends it. A run of one rank then stays until it is ended from outside.

Reports are printed, not logged: a thread that hangs may hold the lock of a log handler.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import random
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn, Self

import torch.distributed as dist
from pydantic import Field

from megalite.checkpoint.manifest import printable
from megalite.checkpoint.safe_files import make_folder, read_small_file, write_small_file
from megalite.config.loading.secrets_in_text import without_secrets
from megalite.config.sections import WatchdogConfig
from megalite.distributed.agreement import from_rank_0
from megalite.resilience.hang_report import explain
from megalite.resilience.rank_registry import RankFile, forget, look_for
from megalite.resilience.rank_state import RankState
from megalite.tracing.activity import NOBODY, Activity, FinishedSpan, Phase, Span
from megalite.units import rounded

log = logging.getLogger(__name__)
LaunchName = Annotated[str, Field(pattern="^[0-9a-f_-]+$")]  # of a folder in that of the run, never of one elsewhere
RECENT = 20  # spans of each kind that a limit is learned from
UNHURRIED = frozenset({Phase.STARTING, Phase.LOADING, Phase.WRITING})  # limited by storage, which may be slow
POLLS_PER_S = 700  # polls of the storage by all ranks together; three times as many near a limit
LOST_S = 3.0  # wait for answers when a peer is known to be gone: a launcher is about to end this rank
FORCED_S = 30.0  # plus four times the wait for answers: then the process exits, explained or not
PAUSE_TICKS = 5  # a watchdog that has not run for so many ticks was stopped with the whole process
EXPLANATION = "explanation.txt"
LONGEST_ANSWER_BYTES = 1 << 24
LOST_MARK = "lost"  # an empty file beside it: a peer is gone, so one answer will never come
LOST = re.compile(  # messages of gloo, NCCL and torch's store when a peer is gone or does not come
    r"connection (was )?(likely )?(reset|closed|refused|aborted|lost|timed out)|broken pipe"
    r"|socket (closed|timeout|error)|(read|write) error|no route to host|network is unreachable"
    r"|timed out (waiting|after)|wait timeout"
    r"|(collective|application|monitored) (operation )?(timeout|barrier)|remote process (has )?exit|ncclRemoteError"
    r"|heartbeat monitor|failed to (connect|recv|send)|connect ?timeout|connectFullMesh failed",
    re.IGNORECASE,
)
GLOO = re.compile(r"\[[^\]]*\bgloo/[^\]]*\.(cc|h):\d+\] ")  # gloo's errors are RuntimeErrors with a source line
NAMES = {
    Phase.STARTING: "The start",
    Phase.LOADING: "Loading a checkpoint",
    Phase.STEP: "Step {step}",
    Phase.EVALUATION: "The evaluation after step {step}",
    Phase.SELF_CHECK: "The comparison of weights after step {step}",
    Phase.WRITING: "Writing a checkpoint's files, in step {step},",
    Phase.CHECKPOINT: "The checkpoint of step {step}",
}


class Limits:
    """Time limits of each kind of work, learned from the spans that have ended."""

    def __init__(self, config: WatchdogConfig) -> None:
        self._config = config
        self._recent: dict[Phase, deque[float]] = {}  # seconds

    def learn(self, ended: FinishedSpan) -> None:
        self._recent.setdefault(ended.kind, deque(maxlen=RECENT)).append(ended.seconds)

    def forget_steps(self) -> None:
        """Gives the next step the limit of the first one, as its batch is another one and code may be compiled."""
        self._recent.pop(Phase.STEP, None)

    def seconds(self, kind: Phase) -> float:
        """Returns the limit of a kind: that of the start until one has ended, and always for `UNHURRIED` kinds."""
        return self._config.limit_s(() if kind in UNHURRIED else self._recent.get(kind, ()))

    def sentence(self, span: Span, seconds: float) -> str:
        """Describes the span that took too long and what its limit was learned from."""
        recent = self._recent.get(span.kind)
        known = f"the longest of the last {len(recent)} took {rounded(max(recent))}" if recent else "it is the first"
        return f"{NAMES[span.kind].format(step=span.step)} has not ended for {rounded(seconds)}; {known}."


def agree_on_launch() -> str:
    """Returns a name for this start of the run, unique and equal on all ranks; collective."""
    return from_rank_0(
        lambda: f"{time.strftime('%Y-%m-%d_%H-%M-%S', time.gmtime())}_{secrets.token_hex(4)}", LaunchName
    )


class Watchdog:
    """Watches the `with` block that trains, by the records in `activity`.

    An exception from a lost peer that leaves the `with` is explained in the same way.
    """

    def __init__(
        self,
        activity: Activity,
        config: WatchdogConfig,
        run_dir: Path,
        launch: str,
        exit_code: int,
        report: Callable[[dict[str, Any]], None],
        same_on_all_ranks: tuple[type[BaseException], ...] = (),
    ) -> None:
        """`launch` is from `agree_on_launch`.

        `report` is called on one rank with the facts of a hang, before all ranks exit with `exit_code`; its exceptions
        are ignored. Exceptions in `same_on_all_ranks` end all ranks alike, so no other rank will look for this one.
        """
        self._activity, self._config, self._exit_code, self._report = activity, config, exit_code, report
        self._same_on_all_ranks = same_on_all_ranks
        self._run_dir, self._folder = run_dir, run_dir / "hang" / launch
        self._limits = Limits(config)
        self._tick_s = min(1.0, config.minimum_seconds / 20)
        self._answer_s = min(30.0, max(1.0, config.minimum_seconds / 10))
        self._awake_since = time.monotonic()
        self._poll_s = min(self._answer_s / 3, max(3.0, activity.mesh.world_size / POLLS_PER_S))
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._poller = threading.Thread(target=self._poll, name="watchdog poll", daemon=True)
        self._is_over = threading.Event()
        self._is_asked = threading.Event()  # another rank has reported a hang
        self._is_near = threading.Event()  # half of the limit has passed
        self._was_paused = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends the process
        self._rank_file: RankFile | None = None

    def __enter__(self) -> Self:
        """Starts the threads, unless the config disables the watchdog."""
        if not self._config.enabled:
            return self
        self._awake_since = time.monotonic()
        self._thread.start()
        self._poller.start()
        try:  # while the thread already watches: storage may hang
            self._rank_file = RankFile(self._run_dir, self._activity.rank)
        except OSError as error:
            log.warning(f"this rank leaves no trace if it gets stuck: {error}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._config.enabled and error is not None and (lost := lost_connection(error)):
            # a launcher that saw the peer die asks this rank to end; DeepSpeed's kills it half a minute later
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            rank, step = self._activity.rank, self._activity.span.step
            self._end_run(f"Rank {rank} lost a connection in step {step} ({lost}).", LOST_S + self._poll_s, error)
        self.stop(error)

    def stop(self, error: BaseException | None = None) -> None:
        """Stops watching, because training is over; on this rank alone if `error` ended it, which is then recorded.

        Does not return if the watchdog is ending this process at the moment.
        """
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._ending.locked():
            threading.Event().wait()
        if self._rank_file is not None:
            is_missed = error is not None and self._activity.mesh.world_size > 1
            with leave_within(2 * self._answer_s + 30.0, self._exit_code):
                if error is not None and is_missed and not isinstance(error, self._same_on_all_ranks):
                    self._rank_file.leave(_one_line(error))
                else:
                    self._rank_file.remove()
                self._rank_file.close()
            self._rank_file = None

    def _watch(self) -> None:
        """Decides, in a thread of its own that touches no file: storage that hangs would block it too."""
        last, batch_changes = time.monotonic(), 0
        while not self._is_over.wait(self._tick_s) and not self._ending.locked():
            now = time.monotonic()
            if now - last > max(1.0, PAUSE_TICKS * self._tick_s):
                # the whole process was stopped for a while (a closed lid, a debugger), which is no hang
                self._awake_since = now
                if self._rank_file is not None:
                    self._rank_file.disarm()
                self._was_paused.set()
            last = now
            changes = self._activity.batch_changes  # before the last steps of the former batch are taken
            while self._activity.ended:
                ended = self._activity.ended.popleft()
                if ended.began >= self._awake_since:
                    self._limits.learn(ended)
            if changes != batch_changes:
                self._limits.forget_steps()
                batch_changes = changes
            span = self._activity.span
            seconds, limit = now - max(span.began, self._awake_since), self._limits.seconds(span.kind)
            if self._rank_file is not None:
                self._rank_file.arm(max(0.0, limit - seconds) + self._tick_s + self._answer_s / 2)
            (self._is_near.set if seconds > limit / 2 else self._is_near.clear)()
            if seconds > limit:
                self._end_run(self._limits.sentence(span, seconds), self._answer_s)
            if self._is_asked.is_set():
                self._end_run("", self._answer_s)

    def _poll(self) -> None:
        """Polls, in a thread of its own, whether another rank has reported a hang."""
        chance = random.Random(self._activity.rank)  # ranks should not all poll at the same moment
        while not self._is_over.is_set():
            was_paused = self._was_paused.wait(
                self._poll_s * chance.uniform(0.5, 1.0) / (3 if self._is_near.is_set() else 1)
            )
            if was_paused:
                self._was_paused.clear()
            with contextlib.suppress(OSError, ValueError):  # storage fails, or the file was just closed
                if was_paused and self._rank_file is not None:
                    self._rank_file.clear()
                if self._folder.exists():
                    self._is_asked.set()
                    return

    def _end_run(self, reason: str, wait_s: float, error: BaseException | None = None) -> NoReturn:
        """Writes this rank's answer, waits until the hang is explained, and ends the process."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # for the other thread to end the process
        # storage may hang here too; the process exits all the same
        seconds = FORCED_S + 4 * wait_s
        unexplained = f"hung: {reason or 'another rank says so.'} Nothing was written to {self._folder} for {{}}."
        _leave_after(seconds, unexplained.format(rounded(seconds)), self._exit_code)
        try:
            if self._rank_file is not None:
                self._rank_file.disarm()
            self._answer(reason, error)
            if (self._folder / LOST_MARK).exists():
                wait_s = min(wait_s, LOST_S + self._poll_s)
            if self._rank_file is not None:
                self._rank_file.remove()
            is_explained = (self._folder / EXPLANATION).exists
            if self._is_to_explain(is_explained, wait_s):
                world_size = self._activity.mesh.world_size
                states = [_read(self._folder, rank, world_size) for rank in range(world_size)]
                self._explain({state.rank: state for state in states if state is not None})
            _wait_until(is_explained, 2 * wait_s)
        except Exception as problem:
            text = f"megalite: hung: {reason} No more can be told: {type(problem).__name__}: {problem}"
            print(text, file=sys.stderr, flush=True)
        finally:
            os._exit(self._exit_code)

    def _answer(self, reason: str, error: BaseException | None) -> None:
        """Writes this rank's records and stacks into the folder of the hang."""
        now, notes = time.monotonic(), self._activity.notes()
        state = RankState(
            rank=self._activity.rank,
            host=socket.gethostname(),
            process=os.getpid(),
            reason=reason,
            notes=tuple(
                note._replace(time=round(now - note.time, 3), peers=NOBODY if note is not notes[-1] else note.peers)
                for note in notes
            ),
        )
        self._run_dir.mkdir(parents=True, exist_ok=True)
        make_folder(self._folder.parent)
        make_folder(self._folder)
        if error is not None:
            write_small_file(self._folder / LOST_MARK, b"")
        name = f"rank_{state.rank:04d}"
        threads = [f"Thread {thread.ident or 0:#018x} is {thread.name}\n" for thread in threading.enumerate()]
        lines = [*threads, *(traceback.format_exception(error) if error is not None else ()), _stacks()]
        write_small_file(self._folder / f"{name}.txt", "".join(lines).encode(errors="replace"))
        _write(self._folder / f"{name}.json", state.packed())  # last: it says that the answer is complete

    def _is_to_explain(self, is_explained: Callable[[], bool], wait_s: float) -> bool:
        """Waits for the answers; returns True on the lowest rank that answered, unless there is an explanation."""
        rank, world_size = self._activity.rank, self._activity.mesh.world_size
        if rank == 0:
            _wait_until(lambda: len(list(self._folder.glob("rank_*.json"))) == world_size, wait_s)
        else:
            _wait_until(is_explained, wait_s)
        is_lowest = not any((self._folder / f"rank_{lower:04d}.json").exists() for lower in range(rank))
        return is_lowest and not is_explained()

    def _explain(self, states: dict[int, RankState]) -> None:
        """Explains the hang on stderr, in its folder, and to `report`."""
        ranks = self._activity.peers.everyone
        unresponsive = {}
        for rank in ranks:
            if rank not in states:
                unresponsive[rank], stacks = look_for(self._run_dir, rank)
                if stacks:
                    write_small_file(self._folder / f"rank_{rank:04d}.txt", stacks)
        is_lost = (self._folder / LOST_MARK).exists()
        explanation = explain(states, unresponsive, self._activity.mesh, is_lost=is_lost)
        stacks_of = len(list(self._folder.glob("rank_*.txt")))
        whose = "all ranks" if stacks_of == len(ranks) else f"{stacks_of} of {len(ranks)} ranks"
        paragraph = f"{explanation.paragraph} The stacks of {whose} are in {self._folder}."
        print(f"megalite: {explanation.headline}: {paragraph}", file=sys.stderr, flush=True)
        try:
            step = states[self._activity.rank].now.step
            self._report({"step": step, "ranks": list(explanation.roots), "explanation": paragraph})
        except Exception as problem:  # the ranks end all the same
            print(f"megalite: the hang is not recorded: {type(problem).__name__}: {problem}", file=sys.stderr)
        for rank in unresponsive:
            forget(self._run_dir, rank)
        _write(self._folder / EXPLANATION, f"{paragraph}\n")  # last: the others leave when they see it


def lost_connection(error: BaseException) -> str:
    """Returns torch's message if `error` comes from a peer that is gone, else ""."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and GLOO.search(text)):
            for line in text.splitlines():
                if LOST.search(line):
                    message = re.sub(r"^\[[^\]]*\] ", "", line)  # without torch's own source line
                    return printable(message.partition(". ")[0].rstrip(". "))
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return ""


@contextlib.contextmanager
def leave_within(seconds: float, exit_code: int) -> Iterator[None]:
    """Ends the process with `exit_code` if the `with` lasts longer than `seconds`.

    For the end of a run, when the watchdog has stopped, and the network and the storage can still hang.
    """
    timer = _leave_after(seconds, f"hung: the end of the run has not ended for {rounded(seconds)}.", exit_code)
    try:
        yield
    finally:
        timer.cancel()


def _leave_after(seconds: float, text: str, exit_code: int) -> threading.Timer:
    """Prints `text` and ends the process after `seconds`, unless the returned timer is cancelled."""

    def leave() -> None:
        printer = threading.Thread(
            target=print, args=(f"megalite: {text}",), kwargs={"file": sys.stderr, "flush": True}
        )
        printer.daemon = True
        with contextlib.suppress(RuntimeError):  # no more threads
            printer.start()
            printer.join(2.0)  # stderr may be a file, on the storage that hangs
        os._exit(exit_code)

    timer = threading.Timer(seconds, leave)
    timer.daemon, timer.name = True, "forced exit"
    timer.start()
    return timer


def _stacks() -> str:
    """Returns the stacks of all threads, through memory: faulthandler holds the interpreter lock while it writes."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")


def _one_line(error: BaseException) -> str:
    line = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
    return printable(str(without_secrets(line)))


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Polls ever less often: thousands of ranks may wait."""
    deadline, pause = time.monotonic() + seconds, 0.05
    while not holds() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2.0, 1.3 * pause)


def _write(path: Path, text: str) -> None:
    """Writes atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_small_file(temporary, text.encode())
    temporary.replace(path)


def _read(folder: Path, rank: int, world_size: int) -> RankState | None:
    """Returns the answer of a rank; None if there is none, or something else."""
    path = folder / f"rank_{rank:04d}.json"
    try:
        state = RankState.unpacked(read_small_file(path, LONGEST_ANSWER_BYTES, trusted=True), world_size)
    except (OSError, ValueError):
        return None
    return state if state.rank == rank else None
