"""The stock `deepspeed` launcher over several hosts, with the settings that make it safe.

In: hosts in rank order, where they meet, what their environment needs. Out: files for it, and its command line.
"""

from __future__ import annotations

import enum
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.errors import LaunchError
from launch.hostfile import Host, hostfile_text, include_words
from launch.hosts.connection import keep_alive
from launch.secret_names import is_secret

SCRIPT = Path(__file__).resolve().parent.parent / "train.py"
TRAVELS = re.compile(  # variables of this shell that ranks on other hosts need as well; DeepSpeed hands on few of them
    r"(NCCL|GLOO|TORCH|UCX|OMP|MKL|KMP|HF|HUGGINGFACE|MLFLOW|TRANSFORMERS|TOKENIZERS|WANDB|AWS|S3|GOOGLE|GCS|AZURE|FSSPEC|DS|DEEPSPEED"
    r"|CUDA|PYTORCH|MEGALITE|GLIBC)_.*|(HTTPS?|NO|ALL)_PROXY|https?_proxy|no_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
# true of this host, or of this process
STAYS = {"CUDA_VISIBLE_DEVICES", "MEGALITE_TREES", "MEGALITE_ATTEMPT", "DS_ENV_FILE"}
PLAIN = re.compile(r"[\w@%+=:./-]+")  # what no shell changes, and no srun
TASKS = "tasks"
NEEDS = {"pdsh": "pdsh", "openmpi": "mpirun", "mpich": "mpirun", "slurm": "srun"}  # launcher -> program


class Launcher(enum.StrEnum):
    """What `deepspeed` starts ranks on other hosts with."""

    PDSH = "pdsh"
    OPENMPI = "openmpi"
    MPICH = "mpich"
    SLURM = "slurm"


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one attempt find each other."""

    address: str
    port: int


@dataclass(frozen=True)
class Environment:
    """Variables of the ranks, besides those of their launcher."""

    shown: dict[str, str]  # on command lines, for everybody on the hosts to see
    private: dict[str, str]  # secrets, and what a shell would change


def check_launcher(launcher: Launcher, hosts: Sequence[Host], ssh_port: int | None = None) -> None:
    """Raises LaunchError where it is not installed, or cannot do what the hosts ask of it."""
    program = NEEDS[launcher]
    if shutil.which(program) is None:
        raise LaunchError(f"--launcher {launcher} needs {program}, which is not on PATH: install it, or choose another")
    if launcher is Launcher.SLURM and "SLURM_JOB_ID" not in os.environ:
        raise LaunchError("--launcher slurm works inside an allocation: run it under salloc, or use `megalite slurm`")
    if launcher is Launcher.PDSH:
        return
    if launcher in (Launcher.OPENMPI, Launcher.MPICH):
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
        if ("Open MPI" in said or "OpenRTE" in said) != (launcher is Launcher.OPENMPI):
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


def environment_of(variables: Mapping[str, str], kept_files: Sequence[Path]) -> Environment:
    """What of this process's `variables`, and of the `.deepspeed_env` files in `kept_files`, ranks need.

    Raises LaunchError where such a file has a line that is not NAME=VALUE; comments and empty lines pass, over which
    DeepSpeed itself breaks.
    """
    wanted = {name: value for name, value in variables.items() if TRAVELS.fullmatch(name) and name not in STAYS}
    for path in kept_files:
        if path.is_file():
            wanted |= _read_environment_file(path)
    shown = {name: value for name, value in wanted.items() if _may_be_seen(name, value)}
    return Environment(shown, {name: value for name, value in wanted.items() if name not in shown})


def _may_be_seen(name: str, value: str) -> bool:
    return bool(PLAIN.fullmatch(value)) and not is_secret(name, value)


def user_environment_files(variables: Mapping[str, str]) -> list[Path]:
    """Where DeepSpeed looks for them."""
    name = variables.get("DS_ENV_FILE", ".deepspeed_env")
    return list(dict.fromkeys(folder / name for folder in (Path.home(), Path.cwd())))


def _read_environment_file(path: Path) -> dict[str, str]:
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchError(f"{path}:{number}: {text!r} is not NAME=VALUE: correct it")
        if "$" in value:
            raise LaunchError(f"{path}:{number}: {name} has a $, which ranks take as it is: write its value out")
        found[name] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return found


def write_files(folder: Path, hosts: Sequence[Host], shown: Mapping[str, str]) -> tuple[Path, Path]:
    """`hostfile` and `environment` of an attempt, and a host per rank for srun, written to `folder`."""
    hostfile, environment = folder / "hostfile", folder / "environment"
    hostfile.write_text(hostfile_text(hosts))
    environment.write_text("".join(f"{name}={value}\n" for name, value in shown.items()))  # nothing secret
    (folder / TASKS).write_text("".join(f"{host.name}\n" * host.slots for host in hosts))
    return hostfile, environment


def command_of(
    launcher: Launcher,
    hosts: Sequence[Host],
    meeting: Meeting,
    hostfile: Path,
    config_path: Path,
    *,
    ssh_port: int | None = None,
    launcher_args: str = "",
) -> list[str]:
    """The command line that starts the ranks."""
    words = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    words += ["--launcher", launcher.value, "--no_ssh_check", "--no_local_rank", "--log_level", "warning"]
    words += ["--force_multi"]  # one host that is left is not this machine
    words += ["--master_addr", meeting.address, "--master_port", str(meeting.port)]
    if ssh_port is not None:
        words += ["--ssh_port", str(ssh_port)]
    if launcher is Launcher.PDSH:
        words += ["--include", include_words(hosts)]
    arguments = [*_own_arguments(launcher, hosts, ssh_port), *shlex.split(launcher_args)]
    if arguments:
        words += [f"--launcher_args={shlex.join(arguments)}"]
    return [*words, str(SCRIPT), str(config_path)]


def launcher_environment(environment_file: Path, patience_s: float) -> dict[str, str]:
    """All variables of the launcher's own process; it would show some of them on command lines."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    words = [*shlex.split(kept.get("PDSH_SSH_ARGS_APPEND", "")), *(f"-o{word}" for word in keep_alive(patience_s))]
    own = {"DS_ENV_FILE": str(environment_file), "PDSH_SSH_ARGS_APPEND": " ".join(words)}
    return kept | own | {"SLURM_HOSTFILE": str(environment_file.with_name(TASKS))}


def _own_arguments(launcher: Launcher, hosts: Sequence[Host], ssh_port: int | None) -> list[str]:
    if launcher is Launcher.OPENMPI:
        # it would bind each rank to one core; ranks choose their threads themselves
        words = ["--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
        return [*words, "--mca", "plm_rsh_args", f"-p {ssh_port}"] if ssh_port is not None else words
    if launcher is Launcher.SLURM:
        return ["--distribution=arbitrary"]  # in the order of SLURM_HOSTFILE; a node list it would sort
    return []
