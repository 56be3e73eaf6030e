"""Builds the command line and the files of the stock `deepspeed` launcher for several hosts, with safe settings.

Input: hosts in rank order, their rendezvous, and the variables of their environment.
"""

from __future__ import annotations

import enum
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.cluster.ssh.connection import keep_alive
from launch.errors import LaunchError
from launch.runtime.hostfile import Host, hostfile_text, include_filter
from launch.runtime.modules import RANK_SCRIPT

TASKS = "tasks"
NEEDS = {"pdsh": "pdsh", "openmpi": "mpirun", "mpich": "mpirun", "slurm": "srun"}  # launcher -> program


class Launcher(enum.StrEnum):
    """Back end with which `deepspeed` starts ranks on other hosts."""

    PDSH = "pdsh"
    OPENMPI = "openmpi"
    MPICH = "mpich"
    SLURM = "slurm"


@dataclass(frozen=True)
class Rendezvous:
    """Address and port at which the ranks of one attempt find each other."""

    address: str
    port: int


def check_launcher(launcher: Launcher, hosts: Sequence[Host], ssh_port: int | None = None) -> None:
    """Raises LaunchError if the launcher is not installed or does not support these hosts."""
    program = NEEDS[launcher]
    if shutil.which(program) is None:
        raise LaunchError(f"--launcher {launcher} needs {program}, which is not on PATH: install it, or choose another")
    if launcher is Launcher.SLURM and "SLURM_JOB_ID" not in os.environ:
        raise LaunchError("--launcher slurm works inside an allocation: run it under salloc, or use `megalite slurm`")
    if launcher is Launcher.PDSH:
        return
    if launcher in (Launcher.OPENMPI, Launcher.MPICH):
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False)
        if ("Open MPI" in done.stdout or "OpenRTE" in done.stdout) != (launcher is Launcher.OPENMPI):
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
    if launcher is Launcher.MPICH and ssh_port is not None:
        raise LaunchError("--launcher mpich cannot be told an --ssh-port: name the port in ~/.ssh/config")
    if launcher in (Launcher.MPICH, Launcher.SLURM) and len({host.slots for host in hosts}) > 1:
        raise LaunchError(f"--launcher {launcher} needs equally many slots on all hosts: use --launcher pdsh")


def write_files(folder: Path, hosts: Sequence[Host], shown: Mapping[str, str]) -> tuple[Path, Path]:
    """Writes the hostfile, the environment file, and a list with a host per rank for srun; returns the first two."""
    hostfile, environment = folder / "hostfile", folder / "environment"
    hostfile.write_text(hostfile_text(hosts))
    environment.write_text("".join(f"{name}={value}\n" for name, value in shown.items()))  # no secrets
    (folder / TASKS).write_text("".join(f"{host.name}\n" * host.slots for host in hosts))
    return hostfile, environment


def launcher_command(
    launcher: Launcher,
    hosts: Sequence[Host],
    rendezvous: Rendezvous,
    hostfile: Path,
    config_path: Path,
    *,
    ssh_port: int | None = None,
    launcher_args: str = "",
) -> list[str]:
    """Returns the command line that starts the ranks."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    command += ["--launcher", launcher.value, "--no_ssh_check", "--no_local_rank", "--log_level", "warning"]
    command += ["--force_multi"]  # a single host that is left need not be this machine
    command += ["--master_addr", rendezvous.address, "--master_port", str(rendezvous.port)]
    if ssh_port is not None:
        command += ["--ssh_port", str(ssh_port)]
    if launcher is Launcher.PDSH:
        command += ["--include", include_filter(hosts)]
    arguments = [*_default_arguments(launcher, ssh_port), *shlex.split(launcher_args)]
    if arguments:
        command += [f"--launcher_args={shlex.join(arguments)}"]
    return [*command, str(RANK_SCRIPT), str(config_path)]


def launcher_environment(environment_file: Path, patience_s: float) -> dict[str, str]:
    """Returns the environment of the launcher's own process, without variables it would put on command lines."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    options = [*shlex.split(kept.get("PDSH_SSH_ARGS_APPEND", "")), *(f"-o{one}" for one in keep_alive(patience_s))]
    own = {"DS_ENV_FILE": str(environment_file), "PDSH_SSH_ARGS_APPEND": " ".join(options)}
    return kept | own | {"SLURM_HOSTFILE": str(environment_file.with_name(TASKS))}


def _default_arguments(launcher: Launcher, ssh_port: int | None) -> list[str]:
    if launcher is Launcher.OPENMPI:
        # Open MPI would bind each rank to one core; ranks choose their threads themselves
        arguments = ["--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
        return arguments if ssh_port is None else [*arguments, "--mca", "plm_rsh_args", f"-p {ssh_port}"]
    if launcher is Launcher.SLURM:
        return ["--distribution=arbitrary"]  # keeps the order of SLURM_HOSTFILE; a node list would be sorted
    return []
