"""Builds the command line and the files of the stock `deepspeed` launcher for several hosts, with safe settings.

Input: hosts in rank order, the address at which their ranks meet, and the variables of their environment.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from launch.cluster.ssh.connection import keep_alive
from launch.errors import LaunchError
from launch.runtime.forwarded_environment import PLAIN
from launch.runtime.hostfile import Host, hostfile_text, include_filter
from launch.runtime.import_path import PYTHON_PATH, import_variables
from launch.runtime.started_modules import DEEPSPEED_RUNNER, RANK_SCRIPT, python_command
from launch.trainer.start.flags import NO_FLAGS, StartFlags
from megalite.config import Config

Launcher = Literal["pdsh", "openmpi", "mpich", "slurm"]  # with which `deepspeed` starts ranks on other hosts
NEEDS: dict[Launcher, str] = {"pdsh": "pdsh", "openmpi": "mpirun", "mpich": "mpirun", "slurm": "srun"}  # its program
FOLDER = ".launch"  # in the run's folder: a folder of files for each attempt
# beginnings of the variables that DeepSpeed's runner puts on command lines by itself: EXPORT_ENVS in
# deepspeed/launcher/runner.py and export_envs() of its accelerators for CPU and CUDA
EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
HOSTFILE, CONFIG, ENVIRONMENT, TASKS = "hostfile", "config.yaml", "environment", "tasks"  # files of an attempt


def check_launcher(launcher: Launcher, hosts: Sequence[Host], ssh_port: int | None = None) -> None:
    """Raises LaunchError if the launcher is not installed or does not support these hosts."""
    program = NEEDS[launcher]
    if shutil.which(program) is None:
        raise LaunchError(f"--launcher {launcher} needs {program}, which is not on PATH: install it, or choose another")
    if launcher == "slurm" and "SLURM_JOB_ID" not in os.environ:
        raise LaunchError("--launcher slurm works inside an allocation: run it under salloc, or use `megalite slurm`")
    if launcher == "pdsh":
        return
    if program == "mpirun":
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False)
        if ("Open MPI" in done.stdout or "OpenRTE" in done.stdout) != (launcher == "openmpi"):
            raise LaunchError(
                f"--launcher {launcher} needs its own mpirun, but {shutil.which('mpirun')} is another's: put it first "
                "on PATH"
            )
    for host in hosts:
        if host.devices != tuple(range(host.slots)):
            raise LaunchError(
                f"--launcher {launcher} starts the first slots of a host, but of {host.name} {list(host.devices)} are "
                "asked for: use --launcher pdsh, or whole hosts"
            )
    if launcher == "mpich" and ssh_port is not None:
        raise LaunchError("--launcher mpich cannot be told an --ssh-port: name the port in ~/.ssh/config")
    if launcher in ("mpich", "slurm") and len({host.slots for host in hosts}) > 1:
        raise LaunchError(f"--launcher {launcher} needs equally many slots on all hosts: use --launcher pdsh")


def check_paths(run_dir: Path) -> None:
    """Raises LaunchError if shells on the hosts would change one of the paths on the launcher's command line."""
    paths = {"run_dir": run_dir, "this folder": Path.cwd(), "Python": Path(sys.executable), "megalite": RANK_SCRIPT}
    paths |= {PYTHON_PATH: Path(import_variables(os.environ)[PYTHON_PATH])}
    for what, path in paths.items():
        if not PLAIN.fullmatch(str(path)):
            raise LaunchError(
                f"{what}, {path}, has characters that shells on the hosts would change: choose a path of letters, "
                "digits and _ - . / alone"
            )


def write_files(folder: Path, hosts: Sequence[Host], shown: Mapping[str, str], config: Config) -> None:
    """Writes the config of the ranks and what the launcher reads into a new folder; `shown` holds no secrets.

    Only this user can read them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    texts = {
        CONFIG: config.to_yaml(),
        HOSTFILE: hostfile_text(hosts),
        ENVIRONMENT: "".join(f"{name}={value}\n" for name, value in shown.items()),
        TASKS: "".join(f"{host.name}\n" * host.slots for host in hosts),  # a host per rank, for srun
    }
    for name, text in texts.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)


def launcher_command(
    launcher: Launcher,
    hosts: Sequence[Host],
    master: tuple[str, int],
    folder: Path,
    *,
    ssh_port: int | None = None,
    launcher_args: str = "",
    flags: StartFlags = NO_FLAGS,
) -> list[str]:
    """Returns the command line that starts the ranks, with the files that `write_files` has put into `folder`.

    `master` is the address and port at which the ranks find each other; `flags` are handed on to them.
    """
    command = python_command(DEEPSPEED_RUNNER, "--hostfile", str(folder / HOSTFILE))
    command += ["--launcher", launcher, "--no_ssh_check", "--no_local_rank", "--log_level", "warning"]
    command += ["--force_multi"]  # a single host that is left need not be this machine
    command += ["--master_addr", master[0], "--master_port", str(master[1])]
    arguments: list[str] = []
    if ssh_port is not None:
        command += ["--ssh_port", str(ssh_port)]
    if launcher == "pdsh":
        command += ["--include", include_filter(hosts)]
    elif launcher == "openmpi":
        # Open MPI would bind each rank to one core; ranks choose their threads themselves
        arguments += ["--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
        arguments += [] if ssh_port is None else ["--mca", "plm_rsh_args", f"-p {ssh_port}"]
    elif launcher == "slurm":
        arguments += ["--distribution=arbitrary"]  # keeps the order of SLURM_HOSTFILE; a node list would be sorted
    arguments += _words(launcher_args, "--launcher-args")
    if arguments:
        command += [f"--launcher_args={shlex.join(arguments)}"]
    return [*command, str(RANK_SCRIPT), str(folder / CONFIG), *flags.words]


def _words(text: str, origin: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{origin} {text!r} is not what a shell could read ({error}): correct its quotes") from None


def launcher_environment(folder: Path, patience_s: float, shown: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the launcher's own process, without variables it would put on command lines.

    Of those it keeps what is in `shown`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(EXPORTED) or name in shown}
    name = "PDSH_SSH_ARGS_APPEND"
    options = [*_words(kept.get(name, ""), name), *(f"-o{one}" for one in keep_alive(patience_s))]
    own = {"DS_ENV_FILE": str(folder / ENVIRONMENT), name: " ".join(options)}
    return kept | own | {"SLURM_HOSTFILE": str(folder / TASKS), "SLURM_KILL_BAD_EXIT": "1"}
