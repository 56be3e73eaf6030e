"""Ends a run that does not move any more, and says why.

Every rank watches itself: a thread compares the age of its current stretch of work (a step, an evaluation, a blocked
save) with a limit learned from those that ended. The first rank whose limit passes writes what it was doing and the
stacks of its threads into `run_dir/hang/LAUNCH`; ranks that see this folder do the same. The lowest rank that answered
explains who waits for whom, and all leave with one exit code. Only files connect the ranks, because what hangs is
their network, or one of them. It may be the storage that hangs: the thread that decides touches no file, and it sets
the time by which the process has left before it does.

The thread runs while the main one is stuck in a collective, which releases the interpreter. Where something keeps the
interpreter to itself the rank cannot answer or leave: its stacks are still written (rank_file.py), the other ranks
name it and leave, and whoever started the ranks ends it. A run of one rank then stays until it is ended from outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from typing import Any, NoReturn

import torch.distributed as dist

from megalite.config.watchdog import WatchdogConfig
from megalite.engine.activity import NOBODY, Activity, Ended, Phase, Stretch
from megalite.resilience.rank_file import RankFile, forget, look_for
from megalite.resilience.who_waits import RankState, duration, explain

RECENT = 20  # stretches of each kind that a limit is learned from
UNHURRIED = frozenset({Phase.STARTING, Phase.LOADING, Phase.WRITING})  # storage may be slow whenever it likes
LOOKS_PER_S = 700  # how often all ranks together ask the storage whether one of them has answered; thrice near a limit
LOST_S = 3.0  # to wait for answers when a peer is known to be gone: a launcher is ending this rank meanwhile
FORCED_S = 30.0  # and four times the time for answers: by then the process has left, explained or not
PAUSE_TICKS = 5  # a watchdog that did not run for so long was stopped, and the whole process with it
EXPLANATION = "explanation.txt"
LOST_MARK = "lost"  # a file beside it: a peer is gone, so one answer will never come
LOST = re.compile(  # what gloo, NCCL, and torch's store say when a peer is gone, or does not come
    r"connection (was )?(reset|closed|refused|aborted|lost|timed out)|broken pipe|socket (closed|timeout|error)"
    r"|(read|write) error|no route to host|network is unreachable|timed out (waiting|after)|wait timeout"
    r"|(collective|application|monitored) (operation )?(timeout|barrier)|remote process (has )?exit|ncclRemoteError"
    r"|heartbeat monitor",
    re.IGNORECASE,
)
GLOO = re.compile(r"\[[^\]]*\bgloo/[^\]]*\.(cc|h):\d+\] ")  # torch raises its errors as RuntimeError, with their place
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
    """How long each kind of work may take."""

    def __init__(self, config: WatchdogConfig) -> None:
        self._config = config
        self._recent: dict[Phase, deque[float]] = {}  # seconds

    def learn(self, ended: Ended) -> None:
        self._recent.setdefault(ended.kind, deque(maxlen=RECENT)).append(ended.seconds)

    def seconds(self, kind: Phase) -> float:
        """Until one of its kind has ended it may take as long as a start; what is unhurried always may."""
        if kind not in self._recent or kind in UNHURRIED:
            return 60.0 * self._config.startup_minutes
        return max(self._config.minimum_seconds, self._config.factor * max(self._recent[kind]))

    def sentence(self, stretch: Stretch, seconds: float) -> str:
        """What took too long, measured by what."""
        recent = self._recent.get(stretch.kind)
        known = f"the longest of the last {len(recent)} took {duration(max(recent))}" if recent else "it is the first"
        return f"{NAMES[stretch.kind].format(step=stretch.step)} has not ended for {duration(seconds)}; {known}."


def agree_on_launch() -> str:
    """A name that all ranks share and no other start of this run has; collective."""
    name: list[Any] = [f"{time.strftime('%Y-%m-%d_%H-%M-%S', time.gmtime())}_{secrets.token_hex(4)}"]  # clocks are set
    dist.broadcast_object_list(name, src=0)
    return str(name[0])


class Watchdog:
    """`with Watchdog(...): train`. Notes in `activity` are all it needs.

    An exception that says that a peer is gone is explained in the same way when it leaves the `with`.
    """

    def __init__(
        self,
        activity: Activity,
        config: WatchdogConfig,
        run_dir: Path,
        launch: str,
        exit_code: int,
        tell: Callable[[dict[str, Any]], None],
        same_on_all_ranks: tuple[type[BaseException], ...] = (),
    ) -> None:
        """`launch` is from `agree_on_launch`. `tell` is called on one rank with what happened, before all ranks leave
        with `exit_code`; what it raises is passed over. Exceptions `same_on_all_ranks` end all of them: nobody will
        look for this one."""
        self._activity, self._config, self._exit_code, self._tell = activity, config, exit_code, tell
        self._same_on_all_ranks = same_on_all_ranks
        self._run_dir, self._folder = run_dir, run_dir / "hang" / launch
        self._limits = Limits(config)
        self._tick_s = min(1.0, config.minimum_seconds / 20)
        self._answer_s = min(30.0, max(1.0, config.minimum_seconds / 10))
        self._awake_since = time.monotonic()
        self._look_s = min(self._answer_s / 3, max(3.0, activity.mesh.world_size / LOOKS_PER_S))
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._looking = threading.Thread(target=self._look, name="watchdog's eye", daemon=True)
        self._is_over = threading.Event()
        self._is_asked = threading.Event()  # another rank thinks that the run does not move
        self._is_near = threading.Event()  # half of the limit has passed
        self._was_paused = threading.Event()
        self._ending = threading.Lock()  # taken by the thread that ends the process
        self._rank_file: RankFile | None = None

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._config.enabled and error is not None and (lost := lost_connection(error)):
            # a launcher that saw the peer die asks this rank to end; DeepSpeed's kills it half a minute later
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            rank, step = self._activity.rank, self._activity.stretch.step
            self._end_run(f"Rank {rank} lost a connection in step {step} ({lost}).", LOST_S + self._look_s, error)
        self.stop(error)

    def start(self) -> None:
        """Nothing happens where the config says so."""
        if not self._config.enabled:
            return
        self._awake_since = time.monotonic()
        self._thread.start()
        self._looking.start()
        try:  # under the thread's eyes
            self._rank_file = RankFile(self._run_dir, self._activity.rank)
        except OSError as error:
            print(f"megalite: this rank leaves no trace if it gets stuck: {error}", file=sys.stderr, flush=True)

    def stop(self, error: BaseException | None = None) -> None:
        """Training is over, on this rank alone if `error` ended it; the others may look for it then.

        Returns only if this rank is not being ended at the moment.
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
        """The thread that decides. It touches no file: a dead storage would hold it up like everything else."""
        last = time.monotonic()
        while not self._is_over.wait(self._tick_s) and not self._ending.locked():
            now = time.monotonic()
            if now - last > max(1.0, PAUSE_TICKS * self._tick_s):
                self._start_again(now)
            last = now
            self._learn()
            stretch = self._activity.stretch
            seconds, limit = now - max(stretch.began, self._awake_since), self._limits.seconds(stretch.kind)
            if self._rank_file is not None:
                self._rank_file.arm(max(0.0, limit - seconds) + self._tick_s + self._answer_s / 2)
            (self._is_near.set if seconds > limit / 2 else self._is_near.clear)()
            if seconds > limit:
                self._end_run(self._limits.sentence(stretch, seconds), self._answer_s)
            if self._is_asked.is_set():
                self._end_run("", self._answer_s)

    def _look(self) -> None:
        """The thread that looks whether another rank thinks that the run does not move."""
        chance = random.Random(self._activity.rank)  # ranks should not all look at the same moment
        while not self._is_over.is_set():
            was_paused = self._was_paused.wait(
                self._look_s * chance.uniform(0.5, 1.0) / (3 if self._is_near.is_set() else 1)
            )
            if was_paused:
                self._was_paused.clear()
            with contextlib.suppress(OSError, ValueError):  # storage with troubles of its own; a file just closed
                if was_paused and self._rank_file is not None:
                    self._rank_file.clear()
                if self._folder.exists():
                    self._is_asked.set()
                    return

    def _start_again(self, now: float) -> None:
        """The whole process was stopped for a while (a closed lid, a debugger): that is nobody's fault."""
        self._awake_since = now
        if self._rank_file is not None:
            self._rank_file.disarm()
        self._was_paused.set()

    def _learn(self) -> None:
        ended = self._activity.ended
        while ended:
            stretch = ended.popleft()
            if stretch.began >= self._awake_since:
                self._limits.learn(stretch)

    def _end_run(self, reason: str, wait_s: float, error: BaseException | None = None) -> NoReturn:
        """Answers, sees to it that the run is explained, and leaves."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # for the other thread to end the process
        # whatever may hang here too, such as the storage: the process leaves
        seconds = FORCED_S + 4 * wait_s
        unexplained = f"hung: {reason or 'another rank says so.'} Nothing was written to {self._folder} for {{}}."
        _leave_after(seconds, unexplained.format(duration(seconds)), self._exit_code)
        try:
            if self._rank_file is not None:
                self._rank_file.disarm()
            self._answer(reason, error)
            if (self._folder / LOST_MARK).exists():
                wait_s = min(wait_s, LOST_S + self._look_s)
            if self._rank_file is not None:
                self._rank_file.remove()
            is_explained = (self._folder / EXPLANATION).exists
            if self._is_to_explain(is_explained, wait_s):
                self._explain(self._answers())
            _wait_until(is_explained, 2 * wait_s)
        except Exception as problem:
            text = f"megalite: hung: {reason} No more can be told: {type(problem).__name__}: {problem}"
            print(text, file=sys.stderr, flush=True)
        finally:
            os._exit(self._exit_code)

    def _answer(self, reason: str, error: BaseException | None) -> None:
        """Writes down where this rank is."""
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
        self._folder.mkdir(parents=True, exist_ok=True)
        if error is not None:
            (self._folder / LOST_MARK).touch()
        name = f"rank_{state.rank:04d}"
        with (self._folder / f"{name}.txt").open("w") as file:
            for thread in threading.enumerate():
                print(f"Thread {thread.ident or 0:#018x} is {thread.name}", file=file)
            if error is not None:
                traceback.print_exception(error, file=file)
            file.write(_stacks())
        _write(self._folder / f"{name}.json", state.packed())  # last: who has answered has answered all

    def _answers(self) -> dict[int, RankState]:
        states = [_read(path) for path in self._folder.glob("rank_*.json")]
        return {state.rank: state for state in states if state is not None}

    def _is_to_explain(self, is_explained: Callable[[], bool], wait_s: float) -> bool:
        """Waits for the answers. Only the lowest rank that answered reads them."""
        rank, world_size = self._activity.rank, self._activity.mesh.world_size
        if rank == 0:
            _wait_until(lambda: len(list(self._folder.glob("rank_*.json"))) == world_size, wait_s)
        else:
            _wait_until(is_explained, wait_s)
        is_lowest = not any((self._folder / f"rank_{lower:04d}.json").exists() for lower in range(rank))
        return is_lowest and not is_explained()

    def _explain(self, states: dict[int, RankState]) -> None:
        """Says what holds the run up: on stderr, in the folder, and to whoever wants to be told."""
        ranks = self._activity.peers.everyone
        silent = {}
        for rank in ranks:
            if rank not in states:
                silent[rank], stacks = look_for(self._run_dir, rank)
                if stacks:
                    (self._folder / f"rank_{rank:04d}.txt").write_bytes(stacks)
        explanation = explain(states, silent, self._activity.mesh)
        stacks_of = len(list(self._folder.glob("rank_*.txt")))
        whose = "all ranks" if stacks_of == len(ranks) else f"{stacks_of} of {len(ranks)} ranks"
        paragraph = f"{explanation.paragraph} The stacks of {whose} are in {self._folder}."
        print(f"megalite: hung: {paragraph}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            step = states[self._activity.rank].now.step
            self._tell({"step": step, "ranks": list(explanation.roots), "explanation": paragraph})
        for rank in silent:
            forget(self._run_dir, rank)
        _write(self._folder / EXPLANATION, f"{paragraph}\n")  # last: the others leave when they see it


def lost_connection(error: BaseException) -> str:
    """What torch said about it, if `error` comes from a peer that cannot be reached any more; else ""."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and GLOO.search(text)):
            for line in text.splitlines():
                if LOST.search(line):
                    said = re.sub(r"^\[[^\]]*\] ", "", line)  # without torch's own source line
                    return said.partition(". ")[0].rstrip(". ")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return ""


@contextlib.contextmanager
def leave_within(seconds: float, exit_code: int) -> Iterator[None]:
    """The process leaves with `exit_code`, in the middle of whatever it is at, if the `with` lasts longer.

    For the end of a run, where no watchdog watches any more, and the network and the storage can still hang.
    """
    timer = _leave_after(seconds, f"hung: the end of the run has not ended for {duration(seconds)}.", exit_code)
    try:
        yield
    finally:
        timer.cancel()


def _leave_after(seconds: float, text: str, exit_code: int) -> threading.Timer:
    """Says `text` and ends the process after `seconds`, unless the timer is cancelled."""

    def leave() -> None:
        saying = threading.Thread(target=print, args=(f"megalite: {text}",), kwargs={"file": sys.stderr, "flush": True})
        saying.daemon = True
        with contextlib.suppress(RuntimeError):  # no more threads
            saying.start()
            saying.join(2.0)  # stderr may be a file, on the storage that hangs
        os._exit(exit_code)

    timer = threading.Timer(seconds, leave)
    timer.daemon, timer.name = True, "end in any case"
    timer.start()
    return timer


def _stacks() -> str:
    """Those of all threads. They pass through memory: faulthandler keeps the interpreter while it writes."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")[:300]


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Looks seldomer and seldomer: there may be thousands that wait."""
    deadline, pause = time.monotonic() + seconds, 0.05
    while not holds() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2.0, 1.3 * pause)


def _write(path: Path, text: str) -> None:
    """All at once for whoever reads it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _read(path: Path) -> RankState | None:
    try:
        return RankState.unpacked(path.read_bytes())
    except (OSError, ValueError):
        return None
