"""Locks a run's folder; writes config.yaml, deepspeed.json and receipt.json into it."""

from __future__ import annotations

import errno
import grp
import json
import os
import platform
import pwd
import stat
import sys
import time
from pathlib import Path
from typing import IO, Any

import psutil

from launch.conversion.huggingface.checkpoint_tokenizer import KEPT
from launch.errors import LaunchError
from launch.runtime.checkout import git_state
from launch.runtime.run_lock import LOCK, is_locked, lock_holder, take_lock
from launch.trainer.start.flags import SHARED_RUN_DIR
from megalite.checkpoint.durable_files import remove_left_overs, write_durably
from megalite.checkpoint.safe_files import UnsafeFile, check_file_is_safe, check_own_folder, user_name
from megalite.config import Config, ResolvedLayout
from megalite.config.loading.secrets_in_text import without_secrets
from megalite.config.versions import installed_version, own_version
from megalite.monitor.events import EVENTS
from megalite.resilience.heartbeat import FOLDER as HEARTBEATS

WITHOUT_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts")  # file systems of the kernel, which take no folders
FILES = ("config.yaml", "deepspeed.json", "receipt.json", "metrics.jsonl", EVENTS, LOCK)
OWN_FOLDERS = (HEARTBEATS, "hang", ".launch")  # which may be no links: their files have names that others know
FOLDERS = ("checkpoints", "hugging_face", KEPT)
PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy")


class RunFolderInUse(LaunchError):
    """Another process holds the lock of a run's folder."""


def lock_run_folder(config: Config, patience_s: float = 0.0, *, shared: bool = False) -> IO[str]:
    """Creates `run_dir` and locks it until the returned file is closed.

    Raises LaunchError if another run holds the lock for longer than `patience_s`: two runs in one folder would
    overwrite each other's files. Raises it too, or UnsafeFile, where others could change them, which `shared` permits.
    """
    make_run_folder(config.run_dir, shared=shared)
    try:
        lock = take_lock(config.run_dir, patience_s)
    except BlockingIOError:
        raise RunFolderInUse(_in_use(config.run_dir)) from None
    except UnsafeFile:
        raise
    except OSError as error:
        raise LaunchError(_not_writable(config.run_dir, error.strerror)) from None
    remove_left_overs(config.run_dir)
    return lock


def make_run_folder(run_dir: Path, *, shared: bool = False) -> None:
    """Creates a run's folder unless it is there, and checks it. Raises LaunchError or UnsafeFile."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(0o775 if shared else 0o755, exist_ok=True)
        _check_rights(run_dir, shared=shared)
        _check_files(run_dir)
    except UnsafeFile:
        raise
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (run_dir, *run_dir.parents) if path.exists())
        raise LaunchError(_not_writable(run_dir, f"{file.absolute()} is a file")) from None
    except OSError as error:
        raise LaunchError(_not_writable(run_dir, error.strerror)) from None


def check_run_folder(config: Config, *, shared: bool = False) -> None:
    """Raises LaunchError or UnsafeFile where `lock_run_folder` would, or what a run writes has no place; creates and
    changes nothing."""
    check_run_place(config.run_dir, shared=shared)
    if is_locked(config.run_dir):
        raise RunFolderInUse(_in_use(config.run_dir))


def check_run_place(run_dir: Path, *, shared: bool = False) -> None:
    """Raises LaunchError or UnsafeFile where a run could not write its folder, which another run may be using now."""
    own = run_dir.absolute()
    place = next(folder for folder in (own, *own.parents) if os.path.lexists(folder))
    if not place.is_dir():
        raise LaunchError(_not_writable(run_dir, "it is a file" if place == own else f"{place} is a file"))
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    top = next((str(folder) for folder in (place.resolve(), *place.resolve().parents) if str(folder) in mounts), "")
    if mounts.get(top) in WITHOUT_FILES:
        raise LaunchError(_not_writable(run_dir, f"{top} is a file system of the kernel"))
    if not os.access(place, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        raise LaunchError(_not_writable(run_dir, os.strerror(errno.EROFS if is_read_only else errno.EACCES)))
    if run_dir.is_dir():
        _check_rights(run_dir, shared=shared)
        _check_files(run_dir)
        _check_folders(run_dir)


def _check_rights(run_dir: Path, *, shared: bool) -> None:
    """Raises LaunchError if others can replace the files of a run, unless the user has said that they may."""
    found, own = run_dir.stat(), os.geteuid()
    if found.st_mode & stat.S_IWOTH:
        raise LaunchError(
            f"run_dir {run_dir} may be written by every user of this machine, who could put checkpoints there: chmod "
            "o-w it, mount its file system with other modes if it has none, or choose another run_dir"
        )
    if shared:
        return
    if found.st_uid not in (own, 0):
        raise LaunchError(
            f"run_dir {run_dir} belongs to {user_name(found.st_uid)}, and you are {user_name(own)}: choose a folder of "
            f"your own, chown it, or trust its owner with {SHARED_RUN_DIR}, as where a container or a file server "
            "gives your files another owner"
        )
    if found.st_mode & stat.S_IWGRP and not found.st_mode & stat.S_ISVTX and not _is_private_group(found.st_gid):
        raise LaunchError(
            f"run_dir {run_dir} may be written by a group, whose members could replace its files: chmod g-w it, or "
            f"trust them with {SHARED_RUN_DIR}"
        )


def _is_private_group(number: int) -> bool:
    """Returns whether a group is this user's alone, as distributions make one for each user with umask 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _check_files(run_dir: Path) -> None:
    """Checks that nothing is in the way of a run's small files, and that none of them leads elsewhere."""
    for name in FILES:
        check_file_is_safe(run_dir / name)
    for name in OWN_FOLDERS:
        check_own_folder(run_dir / name)


def _check_folders(run_dir: Path) -> None:
    """Checks that the run can write its folders: it would show only after steps that are then lost."""
    for path in (run_dir / name for name in FOLDERS):
        if os.path.lexists(path) and not path.is_dir():
            problem = "is a file" if path.exists() else "is a link to nothing"
            raise LaunchError(f"{path} {problem}: move it away or choose another run_dir")
        if path.is_dir() and path.stat().st_mode & stat.S_IWOTH:
            raise LaunchError(f"{path} may be written by every user of this machine: chmod o-w it")
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise LaunchError(f"{path} cannot be written: change its rights or choose another run_dir")


def write_settings(config: Config, deepspeed: dict[str, Any]) -> None:
    """Writes config.yaml, resolved, and deepspeed.json, exactly as passed to DeepSpeed."""
    write_durably(config.run_dir / "config.yaml", config.to_yaml().encode())
    write_durably(config.run_dir / "deepspeed.json", _as_json(deepspeed))


def write_receipt(config: Config, layout: ResolvedLayout, facts: dict[str, Any]) -> None:
    """Writes receipt.json: versions, machine, command, layout and `facts`; at the start and at the end."""
    receipt = {
        "versions": {"megalite": own_version()}
        | {name: installed_version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "machine": {"platform": platform.platform(), "host": platform.node()},
        "command": without_secrets(sys.argv),
        "git": git_state(),
        "layout": layout_facts(layout) | {"gradient_accumulation_steps": layout.gradient_accumulation_steps},
        "seed": config.training.seed,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **facts,
    }
    write_durably(config.run_dir / "receipt.json", _as_json(receipt))


def layout_facts(layout: ResolvedLayout) -> dict[str, int]:
    """Returns a layout as receipts and the manifests of checkpoints hold it."""
    sizes = {
        name: getattr(layout, name) for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    }
    others = {name: getattr(layout, name) for name in ("context_parallel_size", "expert_parallel_size")}
    return sizes | {name: size for name, size in others.items() if size > 1} | {"zero_stage": layout.zero_stage}


def _not_writable(run_dir: Path, reason: str | None) -> str:
    return f"run_dir {run_dir.absolute()} cannot be written: {reason}: choose another run_dir"


def _in_use(run_dir: Path) -> str:
    holder = lock_holder(run_dir)
    who = f" (process {holder.process} on {holder.host} has its lock)" if holder is not None else ""
    return (
        f"another run is using run_dir {run_dir}{who}: wait for it, end it if it is frozen, or choose another run_dir"
    )


def _as_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
