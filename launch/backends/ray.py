"""Runs a training job on Ray Train: each Ray worker starts a rank (`launch.train`) and waits for its end.

A rank is a process of its own, because Ray calls functions in a thread, where signals cannot be handled; a reaper ends
it when its worker is gone. `FailureConfig(max_failures=0)`: Ray would also restart after a mistake, so restarts are
left to our supervisor, which sees from the run folder whether they help. One attempt is a process:
`python -m launch.backends.ray WORKERS GPUS_PER_WORKER ADDRESS ADMITS_INSECURE GRACE_S CONFIG.yaml [OVERRIDES]...
[FLAGS]...`
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launch.backends.ray_cluster import connect
from launch.errors import FAILED_CODE, INTERRUPTED_CODE, PREEMPTED_CODE, STOPPED_CODE, USER_ERROR_CODE, LaunchError
from launch.runtime.forwarded_environment import forwarded_environment
from launch.runtime.import_path import CHECKOUT, import_variables
from launch.runtime.local_ranks import free_port, rank_settings
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.runtime.processes import ProcessTree, StopSignals
from launch.runtime.rank_environment import PRIVATE, take_private_environment
from launch.runtime.started_modules import RANK, REAPER, python_command
from launch.supervision.supervisor import REAPER_S, AttemptEnd, CommandSupervisor, Policy, describe
from launch.trainer.start.flags import split_flags
from launch.trainer.start.run_config import load_run_config
from launch.trainer.start.run_folder import lock_run_folder, make_run_folder
from megalite.checkpoint.safe_files import UnsafeFile, check_file_is_safe, make_folder, write_small_file
from megalite.config import Config
from megalite.distributed.rank_admission import ATTEMPT, SECRET, new_secret
from megalite.resilience.signals import STOP_SIGNALS

log = get_logger("launch.backends.ray")  # this module also runs as __main__

FOLDER = "ray"  # in the run's folder: logs of the ranks, and files of Ray Train
MISTAKE = "megalite: error: "
SAID_BY_RANK_0 = (STOPPED_CODE, PREEMPTED_CODE, INTERRUPTED_CODE)
LOST_CODE = 4  # only of the attempt's process: Ray lost a worker, so ranks have been asked to end
ENDED = re.compile(r"rank \d+ ended with exit code (\d+)")
POLL_S = 0.5  # between two reads of rank 0's log, and two checks whether it has ended
PRIVATE_FOLDER = ".private_"


@dataclass(frozen=True)
class RayJob:
    """Settings of the ranks, the same for all workers."""

    arguments: tuple[str, ...]  # config, overrides and flags
    folder: str  # working directory of the ranks
    logs: str  # folder for their logs
    gpus: int  # per worker
    grace_s: float  # from SIGTERM until what still runs is killed
    environment: dict[str, str]  # no secrets: Ray prints the job, and keeps it where its other users can read it
    private_file: str  # has the other variables, until all workers have read them


class RankEnded(RuntimeError):
    """A rank ended with a code other than 0, so Ray ends the others."""


class RaySupervisor(CommandSupervisor):
    """Also handles a worker that Ray lost, and ranks on other hosts that have not ended yet."""

    def __init__(self, config: Config, command: Sequence[str], policy: Policy, *, is_local: bool) -> None:
        super().__init__(command, policy, config.run_dir, config)
        self._config, self._is_local = config, is_local

    def _attempt(self, signals: StopSignals) -> AttemptEnd:
        ended = super()._attempt(signals)
        if not self._is_local:
            self._wait_for_rank_0(signals)
        if ended.code != LOST_CODE or signals.last is not None:
            return ended
        # the other ranks were asked to end, but the run shall go on
        return replace(ended, code=FAILED_CODE, reason=ended.reason or "Ray lost a worker")

    def _wait_for_rank_0(self, signals: StopSignals) -> None:
        """Waits until rank 0 has unlocked the run's folder: without its worker it saves, and its reaper ends it."""
        deadline = time.monotonic() + self._policy.grace_s + REAPER_S
        while time.monotonic() < deadline and signals.take() is None:
            with contextlib.suppress(LaunchError):
                return lock_run_folder(self._config, shared=True).close()  # checked before the start
            time.sleep(POLL_S)


def main(arguments: Sequence[str]) -> int:
    """Runs one attempt; returns its exit code."""
    count, gpus, address, admits_insecure, grace_s, *run = arguments
    flags, overrides = split_flags(run[1:])
    config = load_run_config(Path(run[0]), overrides)
    make_run_folder(config.run_dir, shared=flags.shared_run_dir)
    logs = config.run_dir.resolve() / FOLDER
    make_folder(logs)
    for rank in range(int(count)):
        check_file_is_safe(logs / f"rank_{rank}.log")
    with contextlib.chdir(CHECKOUT[0] if CHECKOUT else "/"):  # Ray's workers load code from the driver's folder
        folders = connect(address, int(count), admits_insecure=bool(admits_insecure))
    shown, private = forwarded_environment(os.environ, [])
    private |= {SECRET: new_secret()}
    with _private_file(logs, private) as file:

        def end(number: int, _: object) -> None:
            for folder in (str(file.parent), *folders):
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(128 + number)

        for number in STOP_SIGNALS:  # Ray's own handlers print stack traces; its workers end with this process
            signal.signal(number, end)
        variables = shown | {ATTEMPT: os.environ.get(ATTEMPT, "")}
        job = RayJob(tuple(run), str(Path.cwd()), str(logs), int(gpus), float(grace_s), variables, str(file))
        before = {path.name: path.stat().st_size for path in logs.glob("rank_*.log")}  # of earlier attempts
        with _echoed(logs / "rank_0.log"):
            return _fit(job, int(count), before)


@contextlib.contextmanager
def _private_file(folder: Path, variables: dict[str, str]) -> Iterator[Path]:
    """Context in which a file that only this user can read holds `variables` for the workers; rank 0's deletes it."""
    for left in folder.glob(f"{PRIVATE_FOLDER}*"):  # of an attempt that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PRIVATE_FOLDER, dir=folder, ignore_cleanup_errors=True) as private:
        path = Path(private) / "environment"
        write_small_file(path, json.dumps(variables).encode(), private=True)
        if path.stat().st_uid != os.geteuid():
            raise LaunchError(
                f"{folder.parent} is on a file system that gives files another owner, so Ray's workers could not trust "
                "the file with this shell's variables: choose a run_dir on another one"
            )
        yield path


def _fit(job: RayJob, workers: int, before: Mapping[str, int]) -> int:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

    trainer = DataParallelTrainer(
        run_rank,
        train_loop_config={"job": job},
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=job.gpus > 0,
            resources_per_worker={"CPU": 1, **({"GPU": 1} if job.gpus else {})},
        ),
        run_config=RunConfig(storage_path=job.logs, failure_config=FailureConfig(max_failures=0)),
    )
    try:
        trainer.fit()
    except WorkerGroupError as error:
        failures = {rank: str(failure) for rank, failure in error.worker_failures.items()}
        return report_exit_code(failures, Path(job.logs), before)
    except TrainingFailedError as error:
        log.error(f"Ray: {' '.join(str(error).split())}")
        return FAILED_CODE
    return 0


def run_rank(settings: dict[str, Any]) -> None:
    """Runs the rank of a Ray worker, in that worker, from start to end."""
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    job, context = settings["job"], get_context()
    rank, local_size = context.get_world_rank(), context.get_local_world_size()
    private = _read_private(job, rank)
    rendezvous = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free_port()) if rank == 0 else None)
    if rank == 0:  # all have read it: the broadcast waits for all
        shutil.rmtree(Path(job.private_file).parent, ignore_errors=True)
    # a rank with a GPU of its own sees only that
    sees_one = job.gpus and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    os.chdir(job.folder)
    config = load_run_config(Path(job.arguments[0]), split_flags(job.arguments[1:])[1])
    defaults, _ = rank_settings(config.launch, local_size, bool(job.gpus))
    environment = {
        **os.environ,
        **defaults,
        **job.environment,
        **private,
        **import_variables(os.environ),
        "RANK": str(rank),
        "LOCAL_RANK": str(0 if sees_one else context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": rendezvous[0],
        "MASTER_PORT": str(rendezvous[1]),
    }
    command = python_command(REAPER, str(job.grace_s), *python_command(RANK, *job.arguments))
    file = shlex.quote(str(Path(job.logs) / f"rank_{rank}.log"))
    with ProcessTree(["sh", "-c", f"exec {shlex.join(command)} >>{file} 2>&1"], environment) as tree:
        code = tree.process.wait()
    if code:
        raise RankEnded(f"rank {rank} ended with exit code {code}")


def _read_private(job: RayJob, rank: int) -> dict[str, str]:
    """Returns the variables of the private file. If it cannot be read, tells that in the rank's log."""
    found = {PRIVATE: job.private_file}
    try:
        take_private_environment(found)
    except LaunchError as error:
        with (Path(job.logs) / f"rank_{rank}.log").open("a") as file:
            file.write(f"{MISTAKE}{error}\n")
        raise RankEnded(f"rank {rank} ended with exit code {USER_ERROR_CODE}") from None
    if found[PRIVATE] == job.private_file:
        del found[PRIVATE]
    return found


def report_exit_code(failures: dict[int, str], logs: Path, before: Mapping[str, int] = MappingProxyType({})) -> int:
    """Prints why ranks have failed, unless rank 0 did, and returns the exit code of their attempt.

    `before` are the sizes of logs, by name, at its begin.
    """
    codes = {rank: int(match[1]) for rank, text in failures.items() if (match := ENDED.search(text)) is not None}
    if lost := sorted(failures.keys() - codes.keys()):
        log.error(f"Ray lost the worker of rank {lost[0]}")
        return LOST_CODE
    # a rank that lost a peer fails with that code
    rank = min(codes, key=lambda rank: (codes[rank] == FAILED_CODE, rank))
    code = codes[rank]
    # Ray may name another rank although rank 0, whose log is shown, has failed with the same error, or told it
    if rank and code not in SAID_BY_RANK_0 and not _mistakes(logs / "rank_0.log", before):
        path = logs / f"rank_{rank}.log"
        own = _mistakes(path, before)[-1:] if code in (FAILED_CODE, USER_ERROR_CODE) else []
        said = own[0] if own else f"{MISTAKE}rank {rank} ended with {describe(code)}: its log is {path}"
        say(said, file=sys.stderr, flush=True)
    return code


def _mistakes(path: Path, before: Mapping[str, int]) -> list[str]:
    """Returns an attempt's lines of a log that tell the user what to correct; none if it is not there."""
    lines = path.read_bytes()[before.get(path.name, 0) :].decode(errors="replace").splitlines() if path.exists() else []
    return [line for line in lines if MISTAKE in line]


@contextlib.contextmanager
def _echoed(path: Path) -> Iterator[None]:
    """Context that copies what is appended to a log to stdout."""
    is_over, begin = threading.Event(), path.stat().st_size if path.exists() else 0

    def show() -> None:
        position, is_last = begin, False
        while not is_last:
            is_last = is_over.wait(POLL_S)
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(position)
                added = file.read()
                position += len(added)
                sys.stdout.buffer.write(added)
                sys.stdout.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (LaunchError, UnsafeFile) as error:
        log.error(error)
        sys.exit(USER_ERROR_CODE)
