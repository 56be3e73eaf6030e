"""Ends a run that does not move any more, and says why.

Every rank watches itself: a thread compares the age of its current stretch of work (a step, an evaluation, a blocked
save) with a limit learned from those that ended. The first rank whose limit passes writes what it was doing and the
stacks of its threads into `run_dir/hang/LAUNCH`; ranks that see this folder do the same. The lowest rank that answered
explains who waits for whom, and all leave with one exit code. Only files connect the ranks, because what hangs is
their network, or one of them.

The thread runs while the main one is stuck in a collective, which releases the interpreter. Where something keeps the
interpreter to itself the rank cannot answer or leave: its stacks are still written (rank_file.py), the other ranks
name it and leave, and whoever started the ranks ends it. A run of one rank then stays until it is ended from outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from pydantic import ValidationError

from megalite.config.watchdog import WatchdogConfig
from megalite.engine.activity import NOBODY, Activity, Ended, Phase, Stretch
from megalite.resilience.rank_file import RankFile, look_for
from megalite.resilience.who_waits import RankState, duration, explain

RECENT = 20  # stretches of each kind that a limit is learned from
LOST_S = 3.0  # how long to wait for answers when a peer is known to be gone: a launcher is ending this rank meanwhile
PAUSE_TICKS = 5  # a watchdog that did not run for so long was stopped, and the whole process with it
EXPLANATION = "explanation.txt"
NAMES = {
    Phase.STARTING: "The start",
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
        """Until one of its kind has ended it may take as long as a start; a slow disk always may."""
        if kind not in self._recent or kind is Phase.WRITING:
            return 60.0 * self._config.startup_minutes
        return max(self._config.minimum_seconds, self._config.factor * max(self._recent[kind]))

    def sentence(self, stretch: Stretch, seconds: float) -> str:
        """What took too long, measured by what."""
        recent = self._recent.get(stretch.kind)
        known = f"the longest of the last {len(recent)} took {duration(max(recent))}" if recent else "it is the first"
        return f"{NAMES[stretch.kind].format(step=stretch.step)} has not ended for {duration(seconds)}; {known}."


def agree_on_launch() -> str:
    """A name that all ranks share and no other start of this run has; collective."""
    name: list[Any] = [time.strftime("%Y-%m-%d_%H-%M-%S", time.gmtime())]
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
    ) -> None:
        """`launch` is from `agree_on_launch`. `tell` is called on one rank with what happened, before all ranks leave
        with `exit_code`; what it raises is passed over."""
        self._activity, self._config, self._exit_code, self._tell = activity, config, exit_code, tell
        self._run_dir, self._folder = run_dir, run_dir / "hang" / launch
        self._limits = Limits(config)
        self._tick_s = min(1.0, config.minimum_seconds / 20)
        self._answer_s = min(30.0, max(1.0, config.minimum_seconds / 10))
        self._awake_since = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._is_over = threading.Event()
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
            self._end_run(f"Rank {rank} lost a connection in step {step} ({lost}).", LOST_S, error)
        self.stop(error)

    def start(self) -> None:
        """Nothing happens where the config says so."""
        if not self._config.enabled:
            return
        try:
            self._rank_file = RankFile(self._run_dir, self._activity.rank)
        except OSError as error:
            print(f"megalite: this rank leaves no trace if it gets stuck: {error}", file=sys.stderr, flush=True)
        self._awake_since = time.monotonic()
        self._thread.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Training is over, on this rank alone if `error` ended it; the others may look for it then.

        Returns only if this rank is not being ended at the moment.
        """
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)  # it may be held up by the storage
        if self._ending.locked():
            threading.Event().wait()
        if self._rank_file is not None:
            if error is None:
                self._rank_file.remove()
            else:
                self._rank_file.leave(_one_line(error))
            self._rank_file.close()
            self._rank_file = None

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._is_over.wait(self._tick_s):
            now = time.monotonic()
            if now - last > max(1.0, PAUSE_TICKS * self._tick_s):
                self._start_again(now)
            last = now
            self._learn()
            stretch = self._activity.stretch
            seconds, limit = now - max(stretch.began, self._awake_since), self._limits.seconds(stretch.kind)
            if self._rank_file is not None:
                self._rank_file.arm(max(0.0, limit - seconds) + self._tick_s + self._answer_s / 2)
            if seconds > limit:
                self._end_run(self._limits.sentence(stretch, seconds), self._answer_s)
            if self._is_asked():
                self._end_run("", self._answer_s)

    def _is_asked(self) -> bool:
        """Whether another rank thinks that the run does not move."""
        try:
            return self._folder.exists()
        except OSError:  # storage with troubles of its own
            return False

    def _start_again(self, now: float) -> None:
        """The whole process was stopped for a while (a closed lid, a debugger): that is nobody's fault."""
        self._awake_since = now
        if self._rank_file is not None:
            self._rank_file.clear()

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
        forced = threading.Timer(30.0 + 4 * wait_s, os._exit, [self._exit_code])
        forced.daemon, forced.name = True, "end in any case"
        forced.start()
        try:
            self._answer(reason, error)
            if self._rank_file is not None:
                self._rank_file.remove()
            states = self._wait_for_answers(wait_s)
            is_explained = (self._folder / EXPLANATION).exists
            if min(states) == self._activity.rank and not is_explained():
                self._explain(states)
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
        name = f"rank_{state.rank:04d}"
        with (self._folder / f"{name}.txt").open("w") as file:
            for thread in threading.enumerate():
                print(f"Thread {thread.ident or 0:#018x} is {thread.name}", file=file)
            if error is not None:
                traceback.print_exception(error, file=file)
            file.flush()
            faulthandler.dump_traceback(file)  # writes to the descriptor
        _write(self._folder / f"{name}.json", state.model_dump_json())  # last: who has answered has answered all

    def _answers(self) -> dict[int, RankState]:
        states = [_read(path) for path in self._folder.glob("rank_*.json")]
        return {state.rank: state for state in states if state is not None}

    def _wait_for_answers(self, wait_s: float) -> dict[int, RankState]:
        world_size = self._activity.mesh.world_size
        _wait_until(lambda: len(list(self._folder.glob("rank_*.json"))) == world_size, wait_s)
        return self._answers()

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
        _write(self._folder / EXPLANATION, f"{paragraph}\n")  # last: the others leave when they see it


def lost_connection(error: BaseException) -> str:
    """What torch said about it, if `error` comes from a peer that cannot be reached any more; else ""."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and "gloo" in str(seen)):
            said = re.sub(r"^\[[^\]]*\] ", "", str(seen).partition("\n")[0])  # without torch's own source line
            return said.partition(". ")[0].rstrip(". ")
        seen = seen.__cause__ or seen.__context__
    return ""


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")[:300]


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)


def _write(path: Path, text: str) -> None:
    """All at once for whoever reads it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _read(path: Path) -> RankState | None:
    try:
        return RankState.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
