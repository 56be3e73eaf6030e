"""A run that does not move any more ends within its limit and names the rank that holds it up.

Real ranks with real engines: one is stopped, killed, busy forever, or silently gone.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from launch.errors import HUNG_CODE
from launch.runtime.local_ranks import free_port
from megalite.config import resolve_layout
from megalite.config.sections import WatchdogConfig
from megalite.parallel.mesh import Mesh
from megalite.resilience import watchdog as watchdog_module
from megalite.resilience.rank_registry import FOLDER, RankFile, forget, look_for
from megalite.resilience.watchdog import Limits, Watchdog, agree_on_launch, leave_within, lost_connection
from megalite.tracing.activity import Activity, FinishedSpan, Phase, Span
from tests.helpers.engine_cases import Case, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks  # and its server, which all ranks are forked from

LIMIT_S = 3.0  # steps take a tenth of a second where cores are free
CONFIG = WatchdogConfig(minimum_seconds=LIMIT_S, factor=1.0, startup_minutes=1.0)
PATIENT = CONFIG.model_copy(update={"minimum_seconds": 2 * LIMIT_S})  # answers because others ask it to
PATIENCE_S = 40.0  # for things that take a few seconds on a machine with free cores
Trouble = Callable[[Watchdog], None]  # what becomes of a rank in step 3, in the data loader or in a chunk's forward


def loads_forever(watchdog: Watchdog) -> None:
    while True:
        time.sleep(0.01)


def keeps_the_interpreter(watchdog: Watchdog) -> None:
    time.sleep(LIMIT_S / 4)  # until the watchdog knows how long steps take
    re.match("(a|a)*b", "a" * 64)


def goes_away_silently(watchdog: Watchdog) -> None:
    """Like a host without power: its connections stay open as far as the others can see."""
    watchdog.stop()
    threading.Event().wait()


def breaks(watchdog: Watchdog) -> None:
    raise IndexError("sample 7 is not there")


@dataclass(frozen=True)
class Scenario:
    """A run, and which rank gets into what trouble."""

    case: Case
    run_dir: Path
    troubled_rank: int | None = None
    trouble: Trouble | None = None
    position: int | None = None  # of the chunk in whose forward of micro-batch 2 the trouble begins


def _train(rank: int, scenario: Scenario) -> None:
    """Endless steps under a watchdog; rank 0 leaves the number of the last one in `run_dir/steps`."""
    from megalite.engine.build import build_engine
    from models.decoder import decoder_layers

    case, run_dir = scenario.case, scenario.run_dir
    config, mesh = case.config(), Mesh(case.tp, case.pp, case.dp)
    activity, launch = Activity(mesh, rank), agree_on_launch()

    def tell(facts: dict[str, Any]) -> None:
        (run_dir / "told.json").write_text(json.dumps(facts))

    options = PATIENT if rank == 3 else CONFIG
    with Watchdog(activity, options, run_dir, launch, HUNG_CODE, tell) as watchdog:
        engine = build_engine(
            decoder_layers(config.model), config, resolve_layout(config, mesh.world_size, "cpu"), activity=activity
        )
        batch = micro_batches_of(engine, case, global_batches(case)[0])
        for step in itertools.count(1):
            activity.begin_phase(Phase.DATA, step)
            if step == 3 and rank == scenario.troubled_rank and scenario.trouble is not None:
                if scenario.position is None:
                    scenario.trouble(watchdog)
                else:
                    _prepare(engine, scenario.position, partial(scenario.trouble, watchdog))
            engine.train_step(batch, 1e-3)
            activity.begin_phase(Phase.LOGGING)
            if rank == 0:
                (run_dir / "steps").write_text(str(step))


def _prepare(engine: Any, position: int, trouble: Callable[[], None]) -> None:
    """Lets `trouble` begin with the second forward of a chunk."""
    forwards = itertools.count(1)

    def begin(*_: Any) -> None:
        if next(forwards) == 2:
            trouble()

    engine.deepspeed.module.chunks[str(position)].register_forward_pre_hook(begin)


def _rank(rank: int, port: int, scenario: Scenario) -> None:
    world_size = scenario.case.world_size
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (scenario.run_dir / f"stderr_{rank}").open("wb") as stderr:
        os.dup2(stderr.fileno(), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    from megalite.engine.deepspeed.process_groups import start_distributed

    torch.set_num_threads(1)
    start_distributed(rank)
    _train(rank, scenario)


class Job:
    """The processes of a run."""

    def __init__(self, scenario: Scenario, processes: list[BaseProcess]) -> None:
        self.scenario, self.processes = scenario, processes

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.step() < step:
            assert time.monotonic() < deadline, f"step {step} has not ended: {self.stderr(0)}"
            time.sleep(0.05)

    def step(self) -> int:
        file = self.scenario.run_dir / "steps"
        return int((file.read_text() if file.exists() else "") or 0)

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.processes[rank].pid or 0, number)

    def exit_codes(self, without: int | None = None) -> set[int | None]:
        """Those of all ranks but one, once they have left by themselves."""
        deadline = time.monotonic() + PATIENCE_S
        leaving = [process for rank, process in enumerate(self.processes) if rank != without]
        for process in leaving:
            process.join(max(0.0, deadline - time.monotonic()))
        return {process.exitcode for process in leaving}

    def stderr(self, rank: int) -> str:
        file = self.scenario.run_dir / f"stderr_{rank}"
        return file.read_text() if file.exists() else ""

    @property
    def folder(self) -> Path:
        (folder,) = (self.scenario.run_dir / "hang").iterdir()
        return folder

    def told(self) -> dict[str, Any]:
        """What the watchdog said, which is the same wherever it says it, and is said once."""
        told: dict[str, Any] = json.loads((self.scenario.run_dir / "told.json").read_text())
        assert (self.folder / "explanation.txt").read_text() == told["explanation"] + "\n"
        text = f": {told['explanation']}\n"
        said = [said for rank in range(len(self.processes)) if text in (said := self.stderr(rank))]
        assert len(said) == 1
        told["headline"] = said[0].partition(text)[0].splitlines()[-1]
        return told

    def stacks(self) -> dict[int, str]:
        return {int(path.stem[-4:]): path.read_text() for path in sorted(self.folder.glob("rank_*.txt"))}


@contextmanager
def job(
    run_dir: Path,
    case: Case,
    troubled_rank: int | None = None,
    trouble: Trouble | None = None,
    position: int | None = None,
) -> Iterator[Job]:
    """A run that has taken a step; no process of it is left afterwards."""
    scenario = Scenario(case, run_dir, troubled_rank, trouble, position)
    context, port = multiprocessing.get_context("forkserver"), free_port()
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, port, scenario), daemon=True) for rank in range(case.world_size)
    ]
    for process in processes:
        process.start()
    pids = [process.pid or 0 for process in processes]
    try:
        running = Job(scenario, processes)
        running.wait_for_step(2)
        yield running
    finally:
        for process in processes:
            process.kill()
            process.join()
        assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_a_stopped_job_is_left_alone(tmp_path: Path) -> None:
    with job(tmp_path, Case(pp=2, dp=2, accumulation=2, schedule="zero-bubble")) as running:
        running.send(signal.SIGSTOP, *range(4))
        time.sleep(1.5 * LIMIT_S)
        stopped_at = running.step()
        running.send(signal.SIGCONT, *range(4))
        running.wait_for_step(stopped_at + 3)

        running.send(signal.SIGSTOP, 2)
        assert running.exit_codes(without=2) == {HUNG_CODE}
        told = running.told()
        assert told["ranks"] == [2]
        assert told["step"] > stopped_at
        assert f"its process {running.processes[2].pid} is stopped" in told["explanation"]
        assert re.search(r"[Rr]anks? .+ waits? .+ rank 2[;.]", told["explanation"])
        assert "The stacks of 3 of 4 ranks" in told["explanation"]
        assert sorted(running.stacks()) == [0, 1, 3]
        assert all("MainThread" in text and "train_step" in text for text in running.stacks().values())


@pytest.mark.slow
def test_an_endless_data_loader_is_named_with_who_waits_for_it(tmp_path: Path) -> None:
    with job(tmp_path, Case(tp=2, pp=2, accumulation=2), 0, loads_forever) as running:
        assert running.exit_codes() == {HUNG_CODE}
        told = running.told()
        assert (told["ranks"], told["step"]) == ([0], 3)
        for sentence in (
            "Step 3 has not ended for 3",
            "The run waits for rank 0 (stage 0, tensor rank 0, on ",
            "which has been in the data loader for ",
            "Rank 1 waits in the forward of micro-batch 1 for rank 0; rank 2 waits for the activation of micro-batch 1 "
            "from rank 0; rank 3 waits for the activation of micro-batch 1 from rank 1.",
            "The stacks of all ranks",
        ):
            assert sentence in told["explanation"]
        assert "loads_forever" in running.stacks()[0]
        assert not (tmp_path / FOLDER).exists()


@pytest.mark.slow
def test_a_killed_rank_is_named_though_the_others_get_an_error_at_once(tmp_path: Path) -> None:
    with job(tmp_path, Case(pp=2, dp=2, accumulation=4, micro_batch=1, schedule="dualpipev")) as running:
        started = time.monotonic()
        running.send(signal.SIGKILL, 3)
        assert running.exit_codes(without=3) == {HUNG_CODE}
        assert time.monotonic() - started < PATIENCE_S / 2
        told = running.told()
        assert told["ranks"] == [3]
        assert told["headline"] == f"megalite: rank 3 on {socket.gethostname()} died"
        assert "lost a connection in step" in told["explanation"]
        assert f"its process {running.processes[3].pid} is dead" in told["explanation"]
        assert sorted(running.stacks()) == [0, 1, 2]
        assert any("Connection" in text for text in running.stacks().values()), "the traceback of who lost it"


def dies(watchdog: Watchdog) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# schedule, and for a troubled second stage of two the chunk that it computes, as a hang report names it
PIPELINES = [("1f1b", 1, ""), ("interleaved", 3, " of chunk 3"), ("zero-bubble", 1, ""), ("zb-v", 2, " of chunk 2")]
PIPELINES += [("dualpipev", 1, " of chunk 1")]


def _of_schedules(first: str) -> list[Any]:
    """One schedule in every run of the tests, and all in the exhaustive one; unit tests have them all."""
    return [
        pytest.param(*case, id=case[0], marks=[] if case[0] == first else [pytest.mark.exhaustive])
        for case in PIPELINES
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "position", "chunk"), _of_schedules("zb-v"))
def test_a_stage_that_hangs_in_a_pass_is_named_with_chunk_and_micro_batch(
    schedule: str, position: int, chunk: str, tmp_path: Path
) -> None:
    case = Case(pp=2, accumulation=4, micro_batch=1, schedule=schedule)
    with job(tmp_path, case, 1, loads_forever, position) as running:
        assert running.exit_codes() == {HUNG_CODE}
        told = running.told()
        assert (told["ranks"], told["step"]) == ([1], 3)
        assert re.search(
            r"The run waits for rank 1 \(stage 1, on .+\), which has been in the forward of ", told["explanation"]
        )
        assert f"in the forward of micro-batch 2{chunk} for " in told["explanation"]
        assert re.search(r"Rank 0 waits for the (gradient|activation) of micro-batch \d", told["explanation"])
        assert "loads_forever" in running.stacks()[1]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "position", "chunk"), _of_schedules("interleaved"))
def test_a_stage_that_dies_in_a_pass_is_named(schedule: str, position: int, chunk: str, tmp_path: Path) -> None:
    case = Case(pp=2, accumulation=4, micro_batch=1, schedule=schedule)
    with job(tmp_path, case, 1, dies, position) as running:
        assert running.exit_codes(without=1) == {HUNG_CODE}
        told = running.told()
        assert (told["ranks"], told["step"]) == ([1], 3)
        assert f"its process {running.processes[1].pid} is dead" in told["explanation"]


@pytest.mark.slow
def test_a_rank_that_goes_away_silently_is_named(tmp_path: Path) -> None:
    with job(tmp_path, Case(dp=2), 1, goes_away_silently) as running:
        assert running.exit_codes(without=1) == {HUNG_CODE}
        told = running.told()
        assert (told["ranks"], told["headline"]) == ([1], "megalite: hung")
        assert "rank 1 (replica 1), which does not answer: stopped, dead, or cut off" in told["explanation"]
        assert "Rank 0 waits to count the batch's tokens with rank 1." in told["explanation"]


@pytest.mark.slow
def test_a_rank_whose_interpreter_is_taken_leaves_its_stacks(tmp_path: Path) -> None:
    """It can neither answer nor leave: a page fault on dead storage, a deadlock in somebody's C code."""
    with job(tmp_path, Case(dp=2), 1, keeps_the_interpreter) as running:
        assert running.exit_codes(without=1) == {HUNG_CODE}
        told = running.told()
        assert told["ranks"] == [1]
        assert "is alive, but stuck in code that keeps Python's interpreter to itself" in told["explanation"]
        assert "The stacks of all ranks" in told["explanation"]
        assert "keeps_the_interpreter" in running.stacks()[1]


@pytest.mark.slow
def test_the_last_word_of_a_rank_that_broke_is_passed_on(tmp_path: Path) -> None:
    with job(tmp_path, Case(dp=2), 1, breaks) as running:
        assert running.exit_codes(without=1) == {HUNG_CODE}
        assert running.exit_codes() == {HUNG_CODE, 1}, "its own error is not the watchdog's business"
        told = running.told()
        assert told["ranks"] == [1]
        assert "which does not answer: it ended with IndexError: sample 7 is not there." in told["explanation"]


def _stands_still_on_dead_storage(run_dir: Path, stderr: Path) -> None:
    """One rank whose every look at `run_dir` lasts forever once training has begun."""
    sys.stderr = stderr.open("w")
    watchdog_module.FORCED_S = 0.5
    is_dead = threading.Event()

    def until_dead(touch: Callable[..., Any]) -> Callable[..., Any]:
        def touched(path: Any, *arguments: Any, **options: Any) -> Any:
            if is_dead.is_set() and str(path).startswith(str(run_dir)):
                threading.Event().wait()
            return touch(path, *arguments, **options)

        return touched

    for name in ("stat", "mkdir", "unlink", "scandir"):
        setattr(os, name, until_dead(getattr(os, name)))
    options = WatchdogConfig(minimum_seconds=2.0, startup_minutes=1.0 / 60)
    with Watchdog(Activity(Mesh(), 0), options, run_dir, "launch", HUNG_CODE, print):
        is_dead.set()
        threading.Event().wait()


def test_a_run_whose_storage_died_ends_all_the_same(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    assert _exit_code(_stands_still_on_dead_storage, tmp_path / "run", stderr) == HUNG_CODE
    assert "megalite: hung: The start has not ended for 1" in stderr.read_text()
    assert "Nothing was written to" in stderr.read_text()


def _leaves(stderr: Path, hangs: bool) -> None:
    sys.stderr = stderr.open("w")
    with leave_within(0.3, HUNG_CODE):
        time.sleep(60.0 if hangs else 0.0)
    time.sleep(1.0)


def test_the_end_of_a_run_does_not_last_forever(tmp_path: Path) -> None:
    assert _exit_code(_leaves, tmp_path / "stderr", True) == HUNG_CODE
    assert (tmp_path / "stderr").read_text() == "megalite: hung: the end of the run has not ended for 0.3 s.\n"
    assert _exit_code(_leaves, tmp_path / "stderr", False) == 0
    assert (tmp_path / "stderr").read_text() == ""


def _exit_code(target: Callable[..., None], *arguments: Any) -> int | None:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments, daemon=True)
    process.start()
    process.join(PATIENCE_S)
    process.kill()
    process.join()
    return process.exitcode


def _names_of_two_launches(rank: int) -> tuple[str, str]:
    return agree_on_launch(), agree_on_launch()


def test_launches_have_names_of_their_own_even_in_one_second() -> None:
    here, there = run_ranks(_names_of_two_launches, 2)
    assert here == there
    assert here[0] != here[1]


def test_only_the_lowest_rank_that_answered_explains(tmp_path: Path) -> None:
    folder = tmp_path / "hang" / "launch"
    folder.mkdir(parents=True)
    for rank in (1, 3):
        (folder / f"rank_{rank:04d}.json").write_text("whatever it says")
    chosen = []
    for rank in range(1, 4):
        activity = Activity(Mesh(data_parallel_size=4), rank)
        watchdog = Watchdog(activity, CONFIG, tmp_path, "launch", HUNG_CODE, print)
        chosen += [rank] if watchdog._is_to_explain(lambda: False, 0.0) else []
    assert chosen == [1]


def test_limits_are_learned_for_each_kind_of_work() -> None:
    limits = Limits(WatchdogConfig(factor=10, minimum_seconds=300, startup_minutes=30))
    assert limits.seconds(Phase.STEP) == 1800
    for seconds in (5.0, 40.0, 7.0):
        limits.learn(FinishedSpan(Phase.STEP, 0.0, seconds))
    assert limits.seconds(Phase.STEP) == 400, "the longest counts"
    assert limits.seconds(Phase.EVALUATION) == 1800, "no evaluation has ended yet"
    limits.learn(FinishedSpan(Phase.EVALUATION, 0.0, 2.0))
    assert limits.seconds(Phase.EVALUATION) == 300, "the minimum counts"
    assert limits.seconds(Phase.STEP) == 400
    for _ in range(20):
        limits.learn(FinishedSpan(Phase.STEP, 0.0, 35.0))
    assert limits.seconds(Phase.STEP) == 350, "what was long ago is forgotten"
    for unhurried in (Phase.STARTING, Phase.LOADING, Phase.WRITING):
        limits.learn(FinishedSpan(unhurried, 0.0, 1.0))
        assert limits.seconds(unhurried) == 1800, "the next may read or write more"
    sentence = "Step 12 has not ended for 412 s; the longest of the last 20 took 35 s."
    assert limits.sentence(Span(Phase.STEP, 12, 0.0), 412.0) == sentence
    sentence = "The checkpoint of step 12 has not ended for 30 min; it is the first."
    assert limits.sentence(Span(Phase.CHECKPOINT, 12, 0.0), 1801.0) == sentence


def test_the_first_step_of_another_batch_has_the_limit_of_a_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of training may make steps many times as long, and have blocks compiled anew; a run that is ended there
    would be ended again after every restart."""
    said: list[str] = []
    monkeypatch.setattr(Watchdog, "_end_run", lambda self, reason, wait_s: said.append(reason))
    config = WatchdogConfig(factor=2, minimum_seconds=0.2, startup_minutes=1.0)
    for is_changed in (True, False):
        activity = Activity(Mesh(), 0)
        with Watchdog(activity, config, tmp_path, "launch", HUNG_CODE, print):
            for step in range(1, 6):
                activity.begin_phase(Phase.STEP, step)
                time.sleep(0.02)
            activity.batch_changes += is_changed
            time.sleep(1.5)
        assert bool(said) != is_changed, said


@pytest.mark.parametrize("phase", Phase)
def test_every_stretch_has_a_name(phase: Phase) -> None:
    activity = Activity(Mesh(), 0)
    activity.begin_phase(phase, 12)
    assert "has not ended" in Limits(CONFIG).sentence(activity.span, 1.0)


def test_a_run_that_ends_well_leaves_nothing_behind(tmp_path: Path) -> None:
    def tell(facts: dict[str, Any]) -> None:
        raise AssertionError(facts)

    activity = Activity(Mesh(), 0)
    with Watchdog(activity, CONFIG, tmp_path, "launch", HUNG_CODE, tell):
        assert [path.name for path in tmp_path.rglob("*.txt")] == ["rank_0000.txt"]
        time.sleep(0.3)
    assert not list(tmp_path.iterdir())
    off = CONFIG.model_copy(update={"enabled": False})
    with Watchdog(activity, off, tmp_path, "launch", HUNG_CODE, tell):
        assert not list(tmp_path.iterdir())


def test_a_rank_leaves_a_last_word_only_where_another_one_may_look_for_it(tmp_path: Path) -> None:
    for world_size, error, is_left in (
        (2, IndexError("7"), True),
        (2, ArithmeticError("a guard"), False),
        (1, IndexError("7"), False),
    ):
        activity = Activity(Mesh(data_parallel_size=world_size), 0)
        with (
            pytest.raises(type(error)),
            Watchdog(activity, CONFIG, tmp_path, "launch", HUNG_CODE, print, (ArithmeticError,)),
        ):
            raise error
        assert (tmp_path / FOLDER).exists() is is_left
        if is_left:
            assert look_for(tmp_path, 0)[0].condition == "it ended with IndexError: 7"
            forget(tmp_path, 0)
            assert not list(tmp_path.iterdir())


def test_only_what_torch_says_about_peers_counts_as_a_lost_connection() -> None:
    reset = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5342. GLHF!"
    )
    assert lost_connection(RuntimeError(reset)) == "Connection closed by peer [127.0.0.1]:5342"
    assert lost_connection(torch.distributed.DistBackendError("NCCL error in: x.cpp:1, remote process exited"))
    timeout = "[c.cc:1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE) ran for 600 ms"
    nccl = "NCCL error in: x.cpp:1, unhandled system error\nLast error:\nsocketProgress: Call to recv: Connection reset"
    for text in (timeout, nccl, "The client socket has timed out after 60000ms", "Broken pipe"):
        assert lost_connection(torch.distributed.DistBackendError(text)), text
    groups = (  # of which the first rank has died while they are built
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "The client socket has failed to connect to any network address of (127.0.0.1, 43).",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/context.cc:1] Gloo connectFullMesh failed with [x] no error",
    )
    assert all(lost_connection(torch.distributed.DistNetworkError(text)) for text in groups)
    waited = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
    assert lost_connection(RuntimeError(waited)) == "Timed out waiting 1800000ms for recv"
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = RuntimeError(reset)
    assert lost_connection(wrapped)
    of_its_own: list[BaseException] = [
        torch.distributed.DistBackendError(text)
        for text in (
            "NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
            "NCCL error in: x.cpp:1, ncclUnhandledCudaError: Call to CUDA function failed: uncorrectable ECC error",
            "[Rank 3] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access",
        )
    ]
    in_a_folder = RuntimeError("cannot read /runs/gloo/data.bin: Connection reset by peer")
    try:
        try:
            raise RuntimeError(reset)
        except RuntimeError:
            raise ValueError("about something else") from None
    except ValueError as error:
        of_its_own.append(error)
    for other in (
        *of_its_own,
        in_a_folder,
        RuntimeError("shapes do not match"),
        ConnectionResetError("wandb"),
        KeyboardInterrupt(),
    ):
        assert lost_connection(other) == ""


def test_what_is_known_about_a_silent_rank_depends_on_where_it_is(tmp_path: Path) -> None:
    assert look_for(tmp_path, 0)[0].condition == ""
    RankFile(tmp_path, 0)
    silence, stacks = look_for(tmp_path, 0)
    assert silence.condition == f"its process {os.getpid()} is alive, but its watchdog is not"
    assert silence.host and not stacks
    file = tmp_path / FOLDER / "rank_0000.txt"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "born": facts["born"] - 60.0}))
    assert look_for(tmp_path, 0)[0].condition == f"its process {os.getpid()} is dead", "its number was given again"
    elsewhere = {"host": "node87", "process": os.getpid(), "born": 1.0, "ended": ""}
    for text, host in ((json.dumps(elsewhere), "node87"), ("{", ""), ("[]", ""), ("", "")):
        (tmp_path / FOLDER / "rank_0001.txt").write_text(text)
        silence, _ = look_for(tmp_path, 1)
        assert (silence.host, silence.condition) == (host, "")
