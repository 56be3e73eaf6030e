"""Generates the Slurm batch script of a run.

Input: the run and its requests, as a `SlurmJob`. Output: a script for sbatch that runs the job's steps under
`megalite supervise` and requeues the job when the run was asked to end and has saved.
"""

from __future__ import annotations

import os
import re
import shlex
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.errors import INTERRUPTED_CODE, PREEMPTED_CODE
from launch.runtime.import_path import CHECKOUT
from launch.runtime.rank_environment import VARIABLES
from launch.runtime.slurm_rendezvous import FIRST_PORT, PORTS
from launch.runtime.started_modules import COMMAND_LINE, RANK, TORCHRUN, python_command

SCRIPT = Path(__file__).with_name("slurm_job.sh")
LOG = "slurm-%j.log"
PLAIN = re.compile(r"[\w@%+=:,./-]+")  # sbatch takes this without quotes
GPU_OPTIONS = {"gpus-per-node", "gpus", "gres", "gpus-per-task", "gpus-per-socket"}  # sites use different ones
SUBMITTING_SHELL_VARIABLES = (*VARIABLES, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_HOSTFILE")

Spawner = Literal["srun", "torchrun"]


@dataclass(frozen=True)
class SlurmJob:
    """A run and its requests to Slurm."""

    name: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: str | None  # "8" or "a100:8"; None: ranks on the CPU
    run_dir: Path
    directory: Path  # working directory, to which arguments are relative
    arguments: tuple[str, ...]  # config and overrides
    flags: tuple[str, ...]  # further arguments of the ranks
    heading: str  # comment at the top
    requests: dict[str, str | None]  # time, partition, account and qos; None: the cluster's default
    cpus_per_task: int | None
    signal_before_s: int
    spawner: Spawner
    restarts: int
    options: tuple[tuple[str, str | None], ...]  # extra sbatch options without their dashes; they override ours
    environment: dict[str, str]  # defaults for the environment of the ranks

    @property
    def log(self) -> Path:
        """Path of the log of script, supervisor and ranks; %j is the job's id."""
        return self.run_dir / LOG


class _Shell(string.Template):
    """Shell code in which @{name} is replaced, since the shell has its own use for $."""

    delimiter = "@"


def batch_script(job: SlurmJob) -> str:
    """Returns the script. `job.run_dir` must exist when the job starts; Slurm creates no folder and fails silently."""
    unset = [*SUBMITTING_SHELL_VARIABLES, *([] if job.gpus_per_node is None else ["DS_ACCELERATOR"])]
    cpus = job.cpus_per_task
    values = {
        "run_dir": shlex.quote(str(job.run_dir)),
        "unset": " ".join(unset),
        "exports": "\n".join(f'export {name}="${{{name}:-{value}}}"' for name, value in job.environment.items()),
        "checkout": shlex.quote(os.pathsep.join(CHECKOUT)),
        "megalite": shlex.join(python_command(COMMAND_LINE)),
        "torchrun": shlex.join(python_command(TORCHRUN)),
        "rank_command": shlex.join(python_command(RANK, *job.arguments, *job.flags)),
        "arguments": shlex.join(job.arguments),
        "nodes": job.nodes,
        "ranks": job.nodes * job.ranks_per_node,
        "ranks_per_node": job.ranks_per_node,
        "cpus_per_rank": "" if cpus is None else f" --cpus-per-task={cpus}",
        "cpus_per_host": "" if cpus is None else f" --cpus-per-task={cpus * job.ranks_per_node}",
        "first_port": FIRST_PORT,
        "ports": PORTS,
        "per_task": "cat" if job.spawner == "srun" else "uniq",
        "restarts": job.restarts,
        "interrupted": INTERRUPTED_CODE,
        "preempted": PREEMPTED_CODE,
    }
    _, *named = re.split(r"^#: (\w+)\n", SCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    parts = dict(zip(named[::2], named[1::2], strict=True))
    wanted = ["settings", "rank", job.spawner, "attempt", "requeue", *(["place"] if job.nodes > 1 else []), "supervise"]
    code = [_Shell(parts[name].strip()).substitute(values) for name in wanted]
    return "\n\n".join(["\n".join(["#!/bin/bash", *_directives(job)]), f"# {job.heading}", *code]) + "\n"


def _directives(job: SlurmJob) -> list[str]:
    given = {name for name, _ in job.options}
    ours: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks_per_node),
        "gpus-per-node": None if given & GPU_OPTIONS else job.gpus_per_node,
        "cpus-per-task": None if job.cpus_per_task is None else str(job.cpus_per_task),
        **job.requests,
        "chdir": str(job.directory).replace("%", "%%"),  # Slurm replaces %j and the like in file names
        "output": f"{job.run_dir}/".replace("%", "%%") + LOG,
        "open-mode": "append",
        "signal": f"USR1@{job.signal_before_s}",
    }
    lines = [_directive(name, value) for name, value in ours.items() if value is not None and name not in given]
    return [*lines, _directive("requeue", None), *(_directive(name, value) for name, value in job.options)]


def _directive(name: str, value: str | None) -> str:
    if value is None:
        return f"#SBATCH --{name}"
    if not PLAIN.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{name}={value}"
