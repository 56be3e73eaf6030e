"""A run as a Ray Train job: each of Ray's workers starts a rank, `launch.train` as always, and waits for its end.

A rank is a process of its own, because Ray calls functions in a thread, where no signal can be handled; a keeper ends
it when its worker is gone. `FailureConfig(max_failures=0)`: Ray would start again after a mistake as well, so this is
left to our supervisor, which sees from the run folder whether it is of use. One attempt is a process:
`python -m launch.backends.ray WORKERS GPUS_PER_WORKER ADDRESS GRACE_S CONFIG.yaml [OVERRIDES]...`
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.backends.deepspeed import environment_of
from launch.errors import FAILED_CODE, USER_ERROR_CODE, LaunchError
from launch.local import free_port, rank_environment
from launch.processes import STOP_SIGNALS, ProcessTree, StopSignals
from launch.run_config import load_run_config
from launch.run_folder import lock_run_folder
from launch.silence import ATTEMPT
from launch.supervise import KEEPER_S, CommandSupervisor, Ended, Policy
from megalite.config import Config

FOLDER = "ray"  # in the run's folder: what ranks say, and what Ray Train keeps for itself
MISTAKE = "megalite: error: "
LOST_CODE = 4  # of the attempt's process alone: Ray lost a worker, so that ranks have been asked to end
ENDED = re.compile(r"rank \d+ ended with exit code (\d+)")
CONNECT_S = 3.0
LOOK_S = 0.5  # between looks at what rank 0 says, and whether it has left
WORKER_SETTINGS = {"RAY_kill_child_processes_on_worker_exit": "false"}  # keepers are to outlive workers, and end ranks
LOCAL_SETTINGS = {"RAY_prestart_worker_first_driver": "false"}  # nobody would use them, at seconds of CPU each
OWN_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",  # ours is written for it
    "RAY_USAGE_STATS_ENABLED": "0",  # tells nobody
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # an actor that is not needed: ranks save when they are asked to end
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


@dataclass(frozen=True)
class Job:
    """What each worker is told; the same on all hosts."""

    words: tuple[str, ...]  # config and overrides
    folder: str  # where ranks start
    logs: str  # where what they say goes
    gpus: int  # of each worker
    grace_s: float  # from SIGTERM until what still lives is killed
    environment: dict[str, str] = field(
        repr=False
    )  # Ray shows the rest; of whoever started the run, as far as ranks need it


class RankEnded(RuntimeError):
    """A rank ended with another code than 0: Ray ends the others."""


class RaySupervisor(CommandSupervisor):
    """Knows what this host alone does not show: that Ray lost a worker, and when ranks on a cluster have ended."""

    def __init__(self, config: Config, command: Sequence[str], policy: Policy, *, is_local: bool) -> None:
        super().__init__(command, policy, config.run_dir, config.total_steps)
        self._config, self._is_local = config, is_local

    def _attempt(self, signals: StopSignals) -> Ended:
        ended = super()._attempt(signals)
        if not self._is_local:
            self._wait_for_rank_0(signals)
        if ended.code != LOST_CODE or signals.last is not None:
            return ended
        # other ranks have been asked to end, but not for good
        return replace(ended, code=FAILED_CODE, reason=ended.reason or "Ray lost a worker")

    def _wait_for_rank_0(self, signals: StopSignals) -> None:
        """Until it has left the run's folder: it saves when its worker is gone, and its keeper ends it in time."""
        deadline = time.monotonic() + self._policy.grace_s + KEEPER_S
        while time.monotonic() < deadline and signals.take() is None:
            with contextlib.suppress(LaunchError):
                return lock_run_folder(self._config).close()
            time.sleep(LOOK_S)


def main(arguments: Sequence[str]) -> int:
    """The exit code of the attempt."""
    count, gpus, address, grace_s, *words = arguments
    config = load_run_config(Path(words[0]), words[1:])
    logs = config.run_dir.resolve() / FOLDER
    logs.mkdir(parents=True, exist_ok=True)
    os.environ |= OWN_SETTINGS
    _connect(address, int(count))
    for number in STOP_SIGNALS:  # Ray's own handlers print stacks; its workers end with this process
        signal.signal(number, lambda number, _: os._exit(128 + number))
    environment = environment_of(os.environ, [])
    travelling = environment.shown | environment.private | {ATTEMPT: os.environ.get(ATTEMPT, "")}
    job = Job(tuple(words), str(Path.cwd()), str(logs), int(gpus), float(grace_s), travelling)
    with _shown(logs / "rank_0.log"):
        return _fit(job, int(count))


def check_address(address: str) -> None:
    """Raises LaunchError where no Ray cluster can be: Ray itself would try for a quarter of an hour."""
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        raise LaunchError(
            f"--address {address} is not auto or HOST:PORT of a Ray cluster: run this on one of its hosts, with auto"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise LaunchError(
            f"--address {address}: nothing answers there ({error}): start a cluster with `ray start --head`, or leave "
            "--address out"
        ) from None


def _connect(address: str, workers: int) -> None:
    import ray

    check_address(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:  # ranks share the cores of this machine, as under `megalite train`
        os.environ |= WORKER_SETTINGS | LOCAL_SETTINGS
        ray.init("local", num_cpus=workers, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        return
    try:
        ray.init(address, runtime_env={"env_vars": WORKER_SETTINGS}, **quiet)
    except ConnectionError:
        raise LaunchError(
            f"--address {address}: there is no Ray cluster: start one with `ray start --head`, or leave --address out"
        ) from None
    free = ray.cluster_resources()
    if free.get("CPU", 0) < workers:
        print(f"megalite: the Ray cluster has {free.get('CPU', 0):g} CPUs; waiting until it has {workers}", flush=True)


def _fit(job: Job, workers: int) -> int:
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
        return code_of({rank: str(failure) for rank, failure in error.worker_failures.items()}, Path(job.logs))
    except TrainingFailedError as error:
        print(f"megalite: Ray: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return FAILED_CODE
    return 0


def run_rank(told: dict[str, Any]) -> None:
    """In a worker of Ray's: this worker's rank, from its start to its end."""
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    job, context = told["job"], get_context()
    rank, local_size = context.get_world_rank(), context.get_local_world_size()
    meeting = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free_port()) if rank == 0 else None)
    # given a GPU of its own, a rank sees no other
    sees_one = job.gpus and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    os.chdir(job.folder)
    config = load_run_config(Path(job.words[0]), job.words[1:])
    settings, _ = rank_environment(config.launch, local_size, bool(job.gpus))
    environment = {
        **os.environ,
        **settings,
        **job.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(0 if sees_one else context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
    }
    keeper = [sys.executable, "-m", "launch.keep", str(job.grace_s), sys.executable, "-m", "launch.train", *job.words]
    log = Path(job.logs) / f"rank_{rank}.log"
    with ProcessTree(["sh", "-c", f"exec {shlex.join(keeper)} >>{shlex.quote(str(log))} 2>&1"], environment) as tree:
        code = tree.process.wait()
    if code:
        raise RankEnded(f"rank {rank} ended with exit code {code}")


def code_of(failures: dict[int, str], logs: Path) -> int:
    """Of an attempt whose workers failed so, by their ranks; what rank 0 has not told is told here."""
    codes = {rank: int(said[1]) for rank, text in failures.items() if (said := ENDED.search(text)) is not None}
    if lost := sorted(failures.keys() - codes.keys()):
        print(f"megalite: Ray lost the worker of rank {lost[0]}", file=sys.stderr, flush=True)
        return LOST_CODE
    rank = min(codes, key=lambda rank: (codes[rank] == FAILED_CODE, rank))  # who lost a peer fails with that code
    if rank and codes[rank] == USER_ERROR_CODE:
        lines = (logs / f"rank_{rank}.log").read_text(errors="replace").splitlines()
        print(next((line for line in reversed(lines) if line.startswith(MISTAKE)), ""), file=sys.stderr, flush=True)
    return codes[rank]


@contextlib.contextmanager
def _shown(log: Path) -> Iterator[None]:
    """What is added to `log`, on stdout, while it is open."""
    is_over, begin = threading.Event(), log.stat().st_size if log.exists() else 0

    def show() -> None:
        position, is_last = begin, False
        while not is_last:
            is_last = is_over.wait(LOOK_S)
            with contextlib.suppress(OSError), log.open("rb") as file:
                file.seek(position)
                said = file.read()
                position += len(said)
                sys.stdout.buffer.write(said)
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
    except LaunchError as error:
        print(f"{MISTAKE}{error}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR_CODE)
