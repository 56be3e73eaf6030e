"""`megalite slurm`: the words of the command line, and what is said about what was written or submitted. No torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from launch.arguments import ConfigPath, Overrides
from launch.backends.slurm import SlurmJob, Spawner, batch_script
from launch.devices import Device
from launch.errors import LaunchError
from launch.run_config import load_run_config
from megalite.config import Config, ResolvedLayout

TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(?:(\d+):)?(\d+)(?::(\d+))?)")
ENDLESS = ("unlimited", "infinite")
EARLY_S = 60  # Slurm may send its warning that much earlier
GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")
OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.+))?")
OURS = {  # what the script relies on or was checked, and what to give instead
    "nodes": "-N",
    "ntasks": "-N and --gpus-per-node or --ntasks-per-node",
    "ntasks-per-node": "--ntasks-per-node",
    "job-name": "--job-name",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "cpus-per-task": "--cpus-per-task",
    "gpus-per-node": "--gpus-per-node",
    "signal": "--signal-before",
    "chdir": "nothing: the job works where this command was called",
    "array": "one command per run, each with a run_dir of its own",
    "wrap": "nothing: the script is what is submitted",
}


@dataclass(frozen=True)
class Delivery:
    """What is to become of the script."""

    file: Path | None
    overwrite: bool
    submit: bool
    dry_run: bool
    as_json: bool


def slurm(
    config_path: ConfigPath,
    overrides: Overrides = None,
    *,
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="Hosts of the job.")],
    gpus_per_node: Annotated[
        str, typer.Option(metavar="[TYPE:]N", help="GPUs, and ranks, of a host; 0: ranks on the CPU.")
    ],
    ntasks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a host on the CPU; default: what the layout needs.")
    ] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores of a rank; default: the cluster's.")] = None,
    time: Annotated[str | None, typer.Option(help="Limit of one start, as in 24:00:00 or 2-12 (days-hours).")] = None,
    partition: Annotated[str | None, typer.Option(help="Default: the cluster's.")] = None,
    account: Annotated[str | None, typer.Option(help="That is charged.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: the name of the run's folder.")] = None,
    signal_before: Annotated[
        int, typer.Option(min=1, max=65535, help="Seconds before the time limit in which ranks save and leave.")
    ] = 120,
    spawner: Annotated[
        Spawner, typer.Option(help="Who starts a host's ranks: srun each, or torchrun once per host.")
    ] = Spawner.SRUN,
    restarts: Annotated[int, typer.Option(min=0, help="After failures, within one start of the job.")] = 5,
    sbatch_option: Annotated[
        list[str] | None, typer.Option(metavar="--KEY[=VALUE]", help="Any other of sbatch's; may be repeated.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: print.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --output.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to sbatch.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; with --submit, ask Slurm when it would start.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print script, job and notices as JSON.")] = False,
) -> None:
    """Write a Slurm batch script of a run, or --submit it.

    Ranks that fail are started again within the job. Before the time limit, and when the job is preempted, they save
    and the job goes back to the queue; so does a job that lost a host. `scancel` ends it, saved if there is time.

    Example: `megalite slurm configs/quickstart.yaml -N 4 --gpus-per-node 8 --time 24:00:00 --submit`
    """
    from launch.local import rank_environment
    from launch.plan.automatic import sizes_in_words
    from launch.start import check_run
    from launch.supervise import check_resumes

    config = load_run_config(config_path, overrides or [])
    check_resumes(config)
    check_run(config)
    gpus = _gpus(gpus_per_node)
    options = tuple(_option(text) for text in sbatch_option or [])
    layout, ranks, notices = _layout(config, nodes, gpus, ntasks_per_node)
    seconds = None if time is None else seconds_of(time)
    if seconds is not None and seconds <= signal_before + EARLY_S:
        raise LaunchError(
            f"--time {time} leaves nothing to train in: ranks are asked to save {signal_before} s before it, and Slurm "
            f"may be {EARLY_S} s early, so give more, or a smaller --signal-before"
        )
    if gpus and cpus_per_task is None:
        notices.append("without --cpus-per-task most clusters give each rank one core: give it a share of the host's")
    environment, _ = rank_environment(config.launch, ranks, gpus > 0, cores=ranks * (cpus_per_task or 1))
    job = SlurmJob(
        name=_word(job_name, "--job-name") if job_name is not None else _name(config.run_dir),
        nodes=nodes,
        ranks_per_node=ranks,
        gpus_per_node=gpus_per_node if gpus else None,
        run_dir=_line(config.run_dir.absolute(), "run_dir"),
        directory=_line(Path.cwd(), "the working directory"),
        words=(str(config_path), *(overrides or [])),
        heading=f"megalite {version('megalite')}: {nodes} hosts x {ranks} ranks; {sizes_in_words(config, layout)}",
        python=sys.executable,
        time=time,
        partition=None if partition is None else _word(partition, "--partition"),
        account=None if account is None else _word(account, "--account"),
        qos=None if qos is None else _word(qos, "--qos"),
        cpus_per_task=cpus_per_task,
        signal_before_s=signal_before,
        spawner=spawner,
        restarts=restarts,
        options=options,
        environment=environment,
    )
    _check_start(config)
    _deliver(job, Delivery(output, overwrite, submit, dry_run, as_json), notices)


def seconds_of(time: str) -> int | None:
    """A time limit as sbatch takes it; None: there is none. Raises LaunchError."""
    if time.lower() in ENDLESS:
        return None
    found = TIME.fullmatch(time)
    if found is None:
        raise LaunchError(f"--time {time!r} is no time of Slurm's: give minutes, H:M:S as in 24:00:00, or D-H:M:S")
    days, hours, minutes, seconds, *short = (int(part or 0) for part in found.groups())
    if found[1] is None:
        hours, minutes, seconds = short
        if found[5] is not None and found[7] is None:  # two numbers are minutes and seconds
            hours, minutes, seconds = 0, hours, minutes
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _gpus(text: str) -> int:
    found = GPUS.fullmatch(text)
    if found is None:
        raise LaunchError(f"--gpus-per-node {text!r} is no number of GPUs: give one, as 8 or a100:8, or 0 for the CPU")
    return int(found[1])


def _option(text: str) -> tuple[str, str | None]:
    """Name and value."""
    found = OPTION.fullmatch(text)
    if found is None:
        raise LaunchError(f'--sbatch-option {text!r} is none of sbatch\'s: give it as "--key=value" or "--key"')
    if found[1] in OURS:
        raise LaunchError(f"--sbatch-option {text!r} is for another option of this command: give {OURS[found[1]]}")
    return found[1], found[2]


def _word(text: str, option: str) -> str:
    if not text or re.search(r"\s", text):
        raise LaunchError(f"{option} {text!r} is not one word: Slurm would take it for something else")
    return text


def _name(run_dir: Path) -> str:
    return re.sub(r"[^\w.-]+", "-", run_dir.absolute().name).strip("-") or "megalite"


def _line(path: Path, what: str) -> Path:
    if re.search(r"[\n\r]", str(path)):
        raise LaunchError(f"{what} {str(path)!r} has a line break, which Slurm cannot take: choose another")
    return path


def _layout(config: Config, nodes: int, gpus: int, tasks: int | None) -> tuple[ResolvedLayout, int, list[str]]:
    """The layout, ranks per host, and what to tell. Raises ConfigError or LaunchError where they do not fit."""
    from launch.plan.automatic import layout_or_likely
    from megalite.config.known_bad import check_known_bad, installed_versions
    from megalite.planner.search import PIPELINE, TENSOR, Ranks

    if gpus and tasks not in (None, gpus):
        raise LaunchError(
            f"--ntasks-per-node {tasks} and --gpus-per-node {gpus} differ, but a rank has one GPU: leave the first out"
        )
    if not gpus and tasks is None and {TENSOR, PIPELINE} & config.open:
        raise LaunchError(
            "parallel is auto, so nothing says how many ranks a host has on the CPU: give --ntasks-per-node"
        )
    world_size = nodes * gpus if gpus else nodes * tasks if tasks else config.world_size_wanted(None)
    ranks, left_over = divmod(world_size, nodes)
    if left_over or not ranks:
        raise LaunchError(
            f"the layout has {world_size} rank{'s' * (world_size > 1)} on the CPU, which {nodes} hosts cannot share "
            "equally: choose -N so that they can, or give --ntasks-per-node"
        )
    device: Device = "cuda" if gpus else "cpu"
    likely, layout, later = layout_or_likely(config, Ranks(world_size, ranks, device))
    check_known_bad(likely, layout, installed_versions(), device)
    notices = [*layout.notices, *later]
    if ranks % layout.tensor_parallel_size:
        notices.append(
            f"tensor parallelism over {layout.tensor_parallel_size} ranks crosses hosts of {ranks}: every layer will "
            "wait for the network; use a parallel.tensor_parallel_size that divides the ranks of a host"
        )
    return layout, ranks, notices


def _check_start(config: Config) -> None:
    """What a job would find wrong after hours in the queue: its data and the checkpoint it goes on from."""
    from launch.data import open_data
    from launch.resume import checkpoints_of, find_start
    from megalite.checkpoint.manifest import find_latest, step_folders

    root = checkpoints_of(config)
    find_start(config, open_data(config), *(find_latest(root) if step_folders(root) else (None, [])))


def _deliver(job: SlurmJob, delivery: Delivery, notices: list[str]) -> None:
    if delivery.submit and shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch on PATH, so nothing can be submitted: run this on a host of the cluster")
    if delivery.file is not None and delivery.file.exists() and not delivery.overwrite:
        raise LaunchError(f"{delivery.file} is there already: give --overwrite, or write another file")
    text = batch_script(job)
    done, number = [], None
    if not delivery.dry_run:
        _make_folder(job.run_dir)
        if delivery.file is not None:
            delivery.file.write_text(text)
            done.append(f"wrote {delivery.file}" + ("" if delivery.submit else f"; submit it: sbatch {delivery.file}"))
    if delivery.submit:
        answer = _sbatch(text, ["--test-only"] if delivery.dry_run else ["--parsable"])
        if delivery.dry_run:
            done.append(answer)
        else:
            number = answer.partition(";")[0]  # behind it, the cluster's name
            done += _how_to_follow(job, number)
    if delivery.dry_run:
        done.append("dry run: nothing was written or submitted")
    _tell(job, text, number, notices, done, delivery)


def _make_folder(run_dir: Path) -> None:
    """Slurm makes none, and a job whose output has no folder ends without a word."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"run_dir {run_dir} cannot be made: {error.strerror}") from None
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise LaunchError(f"run_dir {run_dir} cannot be written: choose another, or change its rights")


def _sbatch(script: str, words: list[str]) -> str:
    """Its answer. Raises LaunchError where it refuses."""
    done = subprocess.run(["sbatch", *words], input=script, capture_output=True, text=True, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        reason = said[-1].removeprefix("sbatch: error: ") if said else f"exit code {done.returncode}"
        raise LaunchError(f"sbatch does not take the job: {reason}")
    return said[-1].removeprefix("sbatch: ") if said else ""


def _how_to_follow(job: SlurmJob, number: str) -> list[str]:
    log = shlex.quote(str(job.log).replace("%j", number))
    return [
        f"submitted job {number}",
        f"its log: tail -F {log}",
        f"its place in the queue: squeue --start --jobs {number}",
        f"to end it, saved if that takes less than Slurm's KillWait: scancel {number}",
        f"to save and go back to the queue: scancel --signal=USR1 {number}",
        f"to save however long it takes, and end: scontrol update JobId={number} Requeue=0, then the same",
    ]


def _tell(
    job: SlurmJob, text: str, number: str | None, notices: list[str], done: list[str], delivery: Delivery
) -> None:
    if delivery.as_json:
        facts = {"job": number, "nodes": job.nodes, "ranks": job.nodes * job.ranks_per_node, "log": str(job.log)}
        print(json.dumps({**facts, "script": text, "notices": notices, "done": done}, indent=2))
        return
    for notice in notices:
        print(f"megalite: {notice}", file=sys.stderr)
    if delivery.file is None and not delivery.submit:
        print(text, end="")
    for sentence in done:
        print(sentence, file=sys.stderr if delivery.file is None and not delivery.submit else sys.stdout)
