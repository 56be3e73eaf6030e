"""The command `megalite slurm`, and delivery of its batch script; launch/backends generates that. No torch."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from launch.backends.job_generation import Delivery, fit_layout, load_checked_config
from launch.backends.slurm import SlurmJob, Spawner, batch_script
from launch.cli.options import AllowChange, ConfigPath, Force, OutputFile, Overrides, OverwriteFile, SharedRunDir
from launch.errors import LaunchError
from launch.runtime.logs import get_logger
from launch.trainer.start.flags import SHARED_RUN_DIR, StartFlags
from launch.trainer.start.run_folder import check_run_place, make_run_folder
from megalite.config import Config
from megalite.config.loading.secrets_in_text import secret_in
from megalite.config.versions import own_version

log = get_logger(__name__)
TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")
ENDLESS = ("unlimited", "infinite")
EARLY_S = 60  # Slurm may send its warning up to this much earlier
GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")
OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.+))?")
OURS = {  # sbatch options that the script relies on or that were checked -> what to give instead
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
    "chdir": "nothing: the job runs in the directory of this command",
    "array": "one command per run, each with a run_dir of its own",
    "wrap": "nothing: the script is what is submitted",
}


def slurm(
    config_path: ConfigPath,
    overrides: Overrides = None,
    *,
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="Number of hosts.")],
    gpus_per_node: Annotated[
        str, typer.Option(metavar="[TYPE:]N", help="GPUs, and so ranks, per host; 0: ranks on the CPU.")
    ],
    ntasks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per host on the CPU; default: what the layout needs.")
    ] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores per rank; default: the cluster's.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit of one start, such as 24:00:00 or 2-12 (days-hours).")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition; default: the cluster's.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Name of the job; default: that of the run's folder.")] = None,
    signal_before: Annotated[
        int, typer.Option(min=1, max=65535, help="Seconds before the time limit at which ranks save and end.")
    ] = 120,
    spawner: Annotated[
        Spawner, typer.Option(help="Program that starts the ranks: srun one by one, or torchrun once per host.")
    ] = "srun",
    restarts: Annotated[int, typer.Option(min=0, help="Maximum restarts within one start of the job.")] = 5,
    sbatch_option: Annotated[
        list[str] | None, typer.Option(metavar="--KEY[=VALUE]", help="Extra sbatch option; may be repeated.")
    ] = None,
    output: OutputFile = None,
    overwrite: OverwriteFile = False,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script with sbatch.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; with --submit, ask Slurm when the job would start.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print script, job and notices as JSON.")] = False,
    force: Force = False,
    allow_change: AllowChange = False,
    shared_run_dir: SharedRunDir = False,
) -> None:
    """Write a Slurm batch script for a run, or --submit it.

    Failed ranks are restarted within the job. Before the time limit, and when the job is preempted, they save and the
    job is requeued; so is a job that lost a host. `scancel` ends it, with a checkpoint if there is time.

    Example: `megalite slurm configs/quickstart.yaml -N 4 --gpus-per-node 8 --time 24:00:00 --submit`
    """
    from launch.prediction.auto_layout import format_sizes
    from launch.runtime.local_ranks import rank_settings

    flags = StartFlags(force, allow_change, shared_run_dir)
    config = load_checked_config(config_path, overrides)
    gpus = _gpus(gpus_per_node)
    options = tuple(_option(text) for text in sbatch_option or [])
    if gpus and ntasks_per_node not in (None, gpus):
        raise LaunchError(
            f"--ntasks-per-node {ntasks_per_node} and --gpus-per-node {gpus} differ, but a rank has one GPU: leave the "
            "first out"
        )
    layout, ranks, notices = fit_layout(
        config, nodes, gpus, cpu_ranks_per_node=ntasks_per_node, ranks_option="--ntasks-per-node", check_versions=True
    )
    seconds = None if time is None else seconds_of(time)
    if seconds is not None and seconds <= signal_before + EARLY_S:
        raise LaunchError(
            f"--time {time} leaves nothing to train in: ranks are asked to save {signal_before} s before it, and Slurm "
            f"may be {EARLY_S} s early, so give more, or a smaller --signal-before"
        )
    if gpus and cpus_per_task is None:
        notices.append("without --cpus-per-task most clusters give each rank one core: give it a share of the host's")
    environment, _ = rank_settings(config.launch, ranks, gpus > 0, cores=ranks * (cpus_per_task or 1))
    requests = {"time": time, "partition": partition, "account": account, "qos": qos}
    for option, value in {**requests, "job-name": job_name}.items():
        if value is not None and (not value or re.search(r"\s", value)):
            raise LaunchError(f"--{option} {value!r} is not one word: Slurm would take it for something else")
    default_name = re.sub(r"[^\w.-]+", "-", config.run_dir.absolute().name).strip("-")
    job = SlurmJob(
        name=job_name or default_name or "megalite",
        nodes=nodes,
        ranks_per_node=ranks,
        gpus_per_node=gpus_per_node if gpus else None,
        run_dir=_line(config.run_dir.absolute(), "run_dir"),
        directory=_line(Path.cwd(), "the working directory"),
        arguments=(str(config_path), *(overrides or [])),
        flags=tuple(flags.words),
        heading=f"megalite {own_version()}: {nodes} hosts x {ranks} ranks; {format_sizes(config, layout)}",
        requests=requests,
        cpus_per_task=cpus_per_task,
        signal_before_s=signal_before,
        spawner=spawner,
        restarts=restarts,
        options=options,
        environment=environment,
    )
    notices += _check_start(config, flags, may_download=not dry_run)
    _deliver(job, Delivery(output, overwrite, submit, dry_run, as_json), notices)


def seconds_of(time: str) -> int | None:
    """Converts a time limit of sbatch to seconds; None for no limit. Raises LaunchError if it is malformed."""
    if time.lower() in ENDLESS:
        return None
    found = TIME.fullmatch(time)
    if found is None:
        raise LaunchError(f"--time {time!r} is no time of Slurm's: give minutes, H:M:S as in 24:00:00, or D-H:M:S")
    parts = [int(part) for part in found[2].split(":")]
    if found[1] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:  # minutes, minutes:seconds or hours:minutes:seconds
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return ((int(found[1] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _gpus(text: str) -> int:
    found = GPUS.fullmatch(text)
    if found is None:
        raise LaunchError(f"--gpus-per-node {text!r} is no number of GPUs: give one, as 8 or a100:8, or 0 for the CPU")
    return int(found[1])


def _option(text: str) -> tuple[str, str | None]:
    """Splits an sbatch option into name and value."""
    found = OPTION.fullmatch(text)
    if found is None:
        raise LaunchError(f'--sbatch-option {text!r} is none of sbatch\'s: give it as "--key=value" or "--key"')
    if (kind := secret_in(found[2] or "")) is not None:
        raise LaunchError(
            f"--sbatch-option --{found[1]} holds {kind}, which would stand in the script: export it as a variable of "
            "this shell instead"
        )
    if found[1] in OURS:
        raise LaunchError(f"--sbatch-option {text!r} is for another option of this command: give {OURS[found[1]]}")
    return found[1], found[2]


def _line(path: Path, what: str) -> Path:
    if re.search(r"[\n\r]", str(path)):
        raise LaunchError(f"{what} {str(path)!r} has a line break, which Slurm cannot take: choose another")
    return path


def _check_start(config: Config, flags: StartFlags, *, may_download: bool) -> list[str]:
    """Checks data and checkpoint now; otherwise a problem would show only after hours in the queue.

    Returns a notice where this host lacks the data, which may be on storage that only the job's hosts have.
    """
    from data_pipeline.storage.paths import with_ending
    from launch.trainer.data.remote_data import check_remote_data
    from launch.trainer.start.checks import position_without_lock

    local = [path for path in config.data.all_prefixes if path not in config.data.urls]
    files = (with_ending(Path(path).absolute(), ".bin") for path in local)
    if missing := [file for file in files if not file.is_file()]:
        return [
            f"this host has no {missing[0]}, so data and checkpoint are checked only when the job starts, and it ends "
            "with exit code 2 if they are missing there: see that data.path is right on the job's hosts"
        ]
    if notice := check_remote_data(config.data, config.training.sequence_length, log.info):
        return [notice]
    position_without_lock(config, flags, may_download=may_download)
    return []


def _deliver(job: SlurmJob, delivery: Delivery, notices: list[str]) -> None:
    if delivery.submit and shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch on PATH, so nothing can be submitted: run this on a host of the cluster")
    delivery.check()
    is_shared = SHARED_RUN_DIR in job.flags
    check_run_place(job.run_dir, shared=is_shared)
    text, number = batch_script(job), None
    made = []  # innermost first
    if not delivery.dry_run:  # without the folder of its log, Slurm ends a job silently
        made = [folder for folder in (job.run_dir, *job.run_dir.parents) if not folder.exists()]
        make_run_folder(job.run_dir, shared=is_shared)
    done = []
    try:
        if delivery.submit and delivery.dry_run:
            done.append(_sbatch(text, "--test-only"))
        elif delivery.submit:
            number = _sbatch(text, "--parsable").partition(";")[0]  # followed by the cluster's name
            done += _how_to_follow(job, number)
    except LaunchError:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise
    done += delivery.write(text, "" if delivery.submit else f"; submit it: sbatch {delivery.file}")
    if delivery.dry_run:
        done.append("dry run: nothing was written or submitted")
    facts = {"job": number, "nodes": job.nodes, "ranks": job.nodes * job.ranks_per_node, "log": str(job.log)}
    delivery.report(text, {**facts, "script": text}, notices, done)


def _sbatch(script: str, option: str) -> str:
    """Submits a script and returns the last line of the answer. Raises LaunchError if sbatch refuses."""
    done = subprocess.run(["sbatch", option], input=script, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        reason = lines[-1].removeprefix("sbatch: error: ") if lines else f"exit code {done.returncode}"
        raise LaunchError(f"sbatch does not take the job: {reason}")
    return lines[-1].removeprefix("sbatch: ") if lines else ""


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
