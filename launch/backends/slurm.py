"""Generates the Slurm batch script of a run.

Input: the run and its requests, as a `SlurmJob`. Output: a script for sbatch that runs the job's steps under
`megalite supervise` and requeues the job when the run was asked to end and has saved.
"""

from __future__ import annotations

import enum
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from launch.errors import INTERRUPTED_CODE, PREEMPTED_CODE
from launch.runtime.modules import COMMAND_LINE, RANK
from launch.runtime.rank_environment import FIRST_PORT, PORTS, VARIABLES

LOG = "slurm-%j.log"
PLAIN = re.compile(r"[\w@%+=:,./-]+")  # sbatch takes this without quotes
GPU_OPTIONS = {"gpus-per-node", "gpus", "gres", "gpus-per-task", "gpus-per-socket"}  # sites use different ones
SUBMITTING_SHELL_VARIABLES = (*VARIABLES, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_HOSTFILE")

BEFORE = """\
# Slurm sends these to the ranks too, which save and end; this script and the supervisor wait for them
trap '' TERM USR1 USR2 HUP

newest() {{ cat "$run_dir/checkpoints/latest" 2> /dev/null; }}
before=$(newest)

rank() {{
    trap '' TERM USR1 USR2 HUP
    {rank}
    local code=$?
    [ "$code" -eq 0 ] || (set -o noclobber; echo "$code" > "$first_code") 2> /dev/null
    exit "$code"
}}
"""
SRUN = """\
start_ranks() {{
    {srun}
}}
export -f rank
"""
TORCHRUN = """\
ranks_of_host() {{
    trap '' TERM USR1 USR2 HUP
    exec {torchrun}
}}
start_ranks() {{
    {srun}
}}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export -f rank ranks_of_host
"""
ATTEMPT = """\
about_job() {{ scontrol show job "$SLURM_JOB_ID"; }}
state_in() {{ sed -n 's/^ *JobState=\\([^ ]*\\) Reason=\\([^ ]*\\).*/\\1 \\2/p' <<< "$1"; }}

attempt() {{
    local state step code
    state=$(state_in "$(about_job)")
    if [[ -n $state && $state != "RUNNING "* ]]; then
        exit {interrupted}  # Slurm is about to end the job
    fi
    # a step whose srun was killed keeps running, and holds its devices
    for step in $(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep '[.][0-9][0-9]*$'); do
        scancel --quiet --signal=KILL "$step"
    done
    rm -f "$first_code"
    start_ranks
    code=$?
    # when a rank fails, srun ends the others and returns the highest of all codes; the first one counts
    [ -s "$first_code" ] && code=$(< "$first_code")
    exit "$code"
}}
export run_dir first_code distribution
export -f about_job state_in start_ranks attempt
"""
PLACE = """\
# place ranks with much traffic on neighbouring hosts; each start of the job has other hosts
place() {{
    {place}
}}
if ! topology=$(scontrol show topology | grep -E '^(Switch|Block)Name='); then
    say "ranks in Slurm's order of hosts, which tells no topology"
elif ! names=$(place <<< "$topology") || [ "$(wc -l <<< "$names")" -ne {ranks} ] \\
    || ! {per_task} <<< "$names" > "$run_dir/.task_hosts"; then
    say "ranks in Slurm's order of hosts: none could be found by its topology"
else
    export SLURM_HOSTFILE="$run_dir/.task_hosts" MASTER_ADDR="${{names%%$'\\n'*}}"
    distribution=arbitrary
    say "ranks, by Slurm's topology, in this order of hosts:" $(uniq <<< "$names")
fi
"""
AFTER = """\
say() {{ echo "megalite: job $SLURM_JOB_ID $*"; }}

requeue() {{
    local try
    for try in 1 2 3 4 5; do
        if scontrol requeue "$SLURM_JOB_ID" || [[ $(state_in "$(about_job)") == "PENDING "* ]]; then
            say "goes back to the queue: $1"
            return
        fi
        sleep 5
    done
    say "could NOT be put back into the queue ($1): submit it again, the run goes on where it is saved"
}}

say "on $SLURM_JOB_NODELIST, start $((${{SLURM_RESTART_COUNT:-0}} + 1))"
{place}{supervise}
code=$?

if [ "$code" -eq {preempted} ]; then
    job=$(about_job)
    state=$(state_in "$job")
    if [[ $state != "RUNNING "* && $state != *" TimeLimit" ]]; then
        say "was cancelled, or goes back to the queue without our help: ${{state:-its state is not known}}"
    elif grep -q ' Requeue=0 ' <<< "$job"; then
        say "ends here, saved: its Requeue is 0"
    elif [ "$(newest)" = "$before" ] && ! grep -q ' PreemptTime=[0-9]' <<< "$job"; then
        say "is NOT put back into the queue: it was asked to end before one step was done; give it more --time"
    else
        requeue "asked to end, and saved"
    fi
fi
exit "$code"
"""


class Spawner(enum.StrEnum):
    """Program that starts the ranks of a node."""

    SRUN = "srun"
    TORCHRUN = "torchrun"


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
    heading: str  # comment at the top
    python: str
    requests: dict[str, str] = field(default_factory=dict)  # time, partition, account and qos, as far as given
    cpus_per_task: int | None = None
    signal_before_s: int = 120
    spawner: Spawner = Spawner.SRUN
    restarts: int = 5
    options: tuple[tuple[str, str | None], ...] = ()  # extra sbatch options without their dashes; they override ours
    environment: dict[str, str] = field(default_factory=dict)  # defaults for the environment of the ranks

    @property
    def log(self) -> Path:
        """Path of the log of script, supervisor and ranks; %j is the job's id."""
        return self.run_dir / LOG


def batch_script(job: SlurmJob) -> str:
    """Returns the script. `job.run_dir` must exist when the job starts; Slurm creates no folder and fails silently."""
    unset = [*SUBMITTING_SHELL_VARIABLES, *([] if job.gpus_per_node is None else ["DS_ACCELERATOR"])]
    exports = [f'export {name}="${{{name}:-{value}}}"' for name, value in job.environment.items()]
    names = [
        f"run_dir={shlex.quote(str(job.run_dir))}",
        'first_code="$run_dir/.first_code"  # exit code of the first rank that failed',
        "distribution=block  # of srun's tasks over hosts",
        f"unset {' '.join(unset)}",
    ]
    supervise = [
        shlex.join([job.python, "-m", COMMAND_LINE, "supervise", "--restarts", str(job.restarts)]),
        '--run-dir "$run_dir" -- bash -c attempt',
    ]
    blocks = [
        "\n".join(["#!/bin/bash", *_directives(job)]),
        f"# {job.heading}",
        "\n".join([*names, *exports]),
        BEFORE.format(rank=shlex.join([job.python, "-m", RANK, *job.arguments])).rstrip(),
        _start(job).rstrip(),
        ATTEMPT.format(interrupted=INTERRUPTED_CODE).rstrip(),
        AFTER.format(place=_place(job), supervise=_lines(supervise), preempted=PREEMPTED_CODE),
    ]
    return "\n\n".join(blocks)


def _directives(job: SlurmJob) -> list[str]:
    given = {name for name, _ in job.options}
    ours: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks_per_node),
        "gpus-per-node": None if given & GPU_OPTIONS else job.gpus_per_node,
        "cpus-per-task": None if job.cpus_per_task is None else str(job.cpus_per_task),
        **job.requests,
        "chdir": _escaped(job.directory),
        "output": f"{_escaped(job.run_dir)}/{LOG}",
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


def _escaped(path: Path) -> str:
    """Escapes % for file names, in which Slurm replaces %j and the like."""
    return str(path).replace("%", "%%")


def _place(job: SlurmJob) -> str:
    """Returns the shell code that orders the hosts; empty for a single host."""
    if job.nodes == 1:
        return ""
    place = [
        shlex.join([job.python, "-m", COMMAND_LINE, "place", *job.arguments]),
        f'--names --nodes "$SLURM_JOB_NODELIST:{job.ranks_per_node}" --topology /dev/stdin',
    ]
    per_task = "cat" if job.spawner is Spawner.SRUN else "uniq"
    return PLACE.format(place=_lines(place, depth=2), ranks=job.nodes * job.ranks_per_node, per_task=per_task)


def _start(job: SlurmJob) -> str:
    """Returns the shell functions that start the ranks once."""
    if job.spawner is Spawner.SRUN:
        return SRUN.format(srun=_lines([*_srun(job, job.ranks_per_node), "bash -c rank"], depth=2))
    torchrun = [
        f"{shlex.quote(job.python)} -m torch.distributed.run --max-restarts=0 --nproc-per-node={job.ranks_per_node}",
        f'--nnodes={job.nodes} --node-rank="$SLURM_PROCID" --master-addr="$MASTER_ADDR"',
        f"--master-port=$(({FIRST_PORT} + (16 * SLURM_JOB_ID + SLURM_STEP_ID) % {PORTS}))",
        "--signals-to-handle=SIGINT --no-python bash -c rank",  # otherwise it kills ranks that take over 30 s to save
    ]
    srun = [*_srun(job, 1), "bash -c ranks_of_host"]
    return TORCHRUN.format(torchrun=_lines(torchrun, depth=2), srun=_lines(srun, depth=2))


def _srun(job: SlurmJob, tasks_per_node: int) -> list[str]:
    """Returns the srun command with every option set whose default a site may have changed."""
    share = f"--nodes={job.nodes} --ntasks={job.nodes * tasks_per_node} --ntasks-per-node={tasks_per_node}"
    if job.cpus_per_task is not None:  # srun does not inherit it from sbatch
        share += f" --cpus-per-task={job.cpus_per_task * job.ranks_per_node // tasks_per_node}"
    if job.spawner is Spawner.TORCHRUN:
        share += " --cpu-bind=none"
    return [f"srun {share}", '--distribution="$distribution"', "--mpi=none --export=ALL --kill-on-bad-exit=1 --wait=0"]


def _lines(parts: list[str], depth: int = 1) -> str:
    """Joins the parts of a command over several lines."""
    return (" \\\n" + "    " * depth).join(parts)
