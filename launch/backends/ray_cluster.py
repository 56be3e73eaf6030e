"""Connects to a Ray cluster, or starts one on this machine, that admits nobody without its token.

Whoever Ray admits runs programs as the user who started it, so a cluster without tokens is refused unless the user
accepts it. `python -m launch.backends.ray_cluster ADDRESS` asks a cluster, as a process of its own since Ray reads its
token once in a process.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any, Literal

from launch.errors import LaunchError
from launch.runtime.logs import get_logger
from launch.runtime.started_modules import RAY_CLUSTER, python_command

log = get_logger("launch.backends.ray_cluster")

CONNECT_S = 3.0
ANSWER_S = 60.0  # start of a Python with Ray, and Ray's own limit for an answer
LONGEST_FOLDER = 25  # characters that Ray's names of sockets leave of the 107 that a kernel takes
WORKER_SETTINGS = {"RAY_kill_child_processes_on_worker_exit": "false"}  # reapers must outlive workers, to end ranks
LOCAL_SETTINGS = {
    "RAY_prestart_worker_first_driver": "false",  # they would be unused, and take seconds of CPU each
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux, too: a cluster of one machine listens on loopback alone
}
OWN_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",  # the API used here
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # not needed: ranks save on SIGTERM
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ADMITTED, REFUSED, ABSENT = 0, 3, 4  # exit codes of the process that asks
Answer = Literal["admitted", "refused", "absent", "unknown"]
ANSWERS: dict[int, Answer] = {ADMITTED: "admitted", REFUSED: "refused", ABSENT: "absent"}
PROTECT = "`RAY_AUTH_MODE=token ray start` on all of its hosts, after `ray get-auth-token --generate`"


def connect(address: str, workers: int, *, admits_insecure: bool) -> list[str]:
    """Connects this process to the cluster at `address`, or to a new one of this machine if it is empty.

    Returns the folders to remove where this process ends without Python's own clearing up. Raises LaunchError if there
    is no cluster, if it does not admit this user, or if it admits everybody and not `admits_insecure`.
    """
    check_address(address)
    os.environ |= OWN_SETTINGS
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:  # ranks share the cores of this machine, as under `megalite train`
        # the token that Ray would make stays in a file of the home folder that others may be able to read
        os.environ |= WORKER_SETTINGS | LOCAL_SETTINGS | {MODE: "token", TOKEN: secrets.token_hex(32)}
        os.environ["RAY_TMPDIR"] = folder = _private_folder()
        import ray

        ray.init("local", num_cpus=workers, include_dashboard=False, **quiet)
        return [folder]
    _choose_authentication(address, admits_insecure=admits_insecure)
    import ray

    try:
        ray.init(address, runtime_env={"env_vars": WORKER_SETTINGS}, **quiet)
    except ConnectionError:
        raise _absent(address) from None
    free = ray.cluster_resources()
    if free.get("CPU", 0) < workers:
        log.info(f"the Ray cluster has {free.get('CPU', 0):g} CPUs; waiting until it has {workers}")
    return []


def check_address(address: str) -> None:
    """Raises LaunchError if nothing listens at an address; Ray itself would retry for 15 minutes."""
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


def _choose_authentication(address: str, *, admits_insecure: bool) -> None:
    """Sets this process's variables to what a running cluster asks for. Raises LaunchError as `connect` does."""
    log.info(f"asking the Ray cluster at {address} whether it wants a token")
    others = {name: value for name, value in os.environ.items() if name not in (MODE, TOKEN, TOKEN_PATH)}
    answer = _ask(address, others | {MODE: "disabled"})
    if answer == "absent":
        raise _absent(address)
    if answer == "refused":
        os.environ[MODE] = "token"
        if _ask(address, dict(os.environ)) != "admitted":
            raise LaunchError(
                f"--address {address}: the Ray cluster wants a token, and this user has another or none: put the "
                f"cluster's into ~/.ray/auth_token, with mode 0600, or name its file in {TOKEN_PATH}"
            )
        return
    if not admits_insecure:
        found = "admits everybody without a token" if answer == "admitted" else "does not say whether it wants a token"
        raise LaunchError(
            f"--address {address}: the Ray cluster {found}, so who reaches it could run programs as you: start it with "
            f"{PROTECT}, or give --insecure-cluster if nobody else reaches its network"
        )
    os.environ[MODE] = "disabled"


def _ask(address: str, variables: dict[str, str]) -> Answer:
    """Asks a cluster, in a process with these environment variables, whether it admits that process."""
    try:
        done = subprocess.run(
            python_command(RAY_CLUSTER, address), env=variables, capture_output=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "unknown"
    return ANSWERS.get(done.returncode, "unknown")


def _knock(address: str) -> int:
    """Sends a first request to a cluster with this process's token; returns an exit code for `_ask`."""
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    from ray.exceptions import AuthenticationError

    try:
        GcsClient(address=canonicalize_bootstrap_address_or_die(address))
    except AuthenticationError:
        return REFUSED
    except ConnectionError:
        return ABSENT
    return ADMITTED


def _absent(address: str) -> LaunchError:
    return LaunchError(
        f"--address {address}: there is no Ray cluster: start one with {PROTECT}, or leave --address out"
    )


def _private_folder() -> str:
    """Makes a folder for Ray's logs and sockets, which are otherwise in one that all users can write."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="r", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # before Ray's own, so that it runs after it
    return folder


if __name__ == "__main__":
    sys.exit(_knock(sys.argv[1]))
