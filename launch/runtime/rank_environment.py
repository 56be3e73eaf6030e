"""Reads this process's rank from the environment variables of its launcher.

Input: the variables of deepspeed and torchrun, Open MPI, MPICH and Intel MPI (PMI), a Slurm step, PMIx, or a Kubeflow
pod. Output: the variables that torch and DeepSpeed read. If launchers are nested, the innermost counts: whatever has
set RANK, LOCAL_RANK and WORLD_SIZE, then MPI, then Slurm, then Kubeflow.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import LaunchError
from launch.runtime import slurm_rendezvous
from launch.runtime.devices import gpu_count
from launch.runtime.local_ranks import free_port
from megalite.checkpoint.safe_files import UnsafeFile, read_small_file

Environment = Mapping[str, str]
Reader = Callable[[Environment], "Rank | None"]
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
PRIVATE = "MEGALITE_PRIVATE_ENVIRONMENT"  # names a file with variables that must not appear on command lines
PRIVATE_BYTES = 1 << 24  # Linux takes fewer in an environment
DEFAULT_PORT = 29500  # torch's and DeepSpeed's
NOWHERE = ("", 0)  # the launcher gives no rendezvous address
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torch's and DeepSpeed's names
MPI_LOCAL_RANKS = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")  # MPICH and Intel MPI; Cray


@dataclass(frozen=True)
class Rank:
    """This process among the ranks of the job."""

    rank: int
    local_rank: int
    world_size: int
    launcher: str = ""  # name for messages; empty: only RANK, LOCAL_RANK and WORLD_SIZE are known
    has_several_hosts: bool | None = None  # None: the launcher does not say
    master: tuple[str, int] = NOWHERE  # rendezvous address and port

    @property
    def is_alone(self) -> bool:
        """True if it is the only task of a scheduler, which may start ranks of its own, like a shell."""
        return self.world_size == 1 and self.launcher not in ("", "deepspeed", "torchrun")


def set_rank_variables() -> Rank | None:
    """Sets the variables that torch reads, and returns the rank of this process; None outside a launcher."""
    rank = read_rank(os.environ)
    if rank is not None:
        address, port = rank.master
        values = dict(zip(VARIABLES, (rank.rank, rank.local_rank, rank.world_size), strict=True))
        for name, value in (values | {"MASTER_ADDR": address, "MASTER_PORT": port}).items():
            os.environ.setdefault(name, str(value))
    return rank


def waiting_hint(rank: Rank) -> str:
    """Returns, in brackets, what makes this process wait for other ranks, which may be variables left over."""
    if rank.launcher:
        return f" (started by {rank.launcher})" if rank.has_several_hosts else ""
    return " (RANK, WORLD_SIZE, MASTER_ADDR come from the environment; unset them to train on this machine alone)"


def is_rank() -> bool:
    """Returns whether this process is one of several ranks, or was started by a launcher. Sets no variable."""
    rank = read_rank(os.environ)
    return rank is not None and not rank.is_alone


def read_rank(environment: Environment) -> Rank | None:
    """Returns None if no launcher started this process. Raises LaunchError if the variables contradict each other."""
    given = {name: _number(environment, name) for name in VARIABLES if name in environment}
    readers = (_from_open_mpi, _from_pmi, _from_slurm, _from_pmix, _from_kubeflow)
    if len(given) == len(VARIABLES):
        found = _from_variables(environment, given)
    elif (scheduled := next(filter(None, (read(environment) for read in readers)), None)) is not None:
        found = _with_given(given, scheduled)
    elif given:
        missing = _listed([name for name in VARIABLES if name not in given])
        raise LaunchError(
            f"the environment has {_listed(list(given))} but not {missing}: set all three, as launchers do, or none"
        )
    else:
        return None
    if found.rank >= found.world_size:
        raise LaunchError(
            f"the environment says that this is rank {found.rank} of {found.world_size}, from 0: correct it"
        )
    if len(given) == len(VARIABLES):
        _check_sizes(environment, found, readers)
    return replace(found, master=_master(environment, found))


def _check_sizes(environment: Environment, found: Rank, readers: Sequence[Reader]) -> None:
    """Raises LaunchError where sizes contradict RANK, LOCAL_RANK and WORLD_SIZE, which a shell may have left over."""
    for name in LOCAL_SIZES:
        if name in environment and not found.local_rank < _number(environment, name) <= found.world_size:
            raise LaunchError(
                f"LOCAL_RANK is {found.local_rank}, {name} {environment[name]} and WORLD_SIZE {found.world_size}, "
                "which do not go together: unset what another start has left over"
            )
    outer = None if found.launcher else _scheduled(environment, readers)
    if outer is not None and outer.world_size > found.world_size:
        raise LaunchError(
            f"{outer.launcher} has started {outer.world_size} ranks, and WORLD_SIZE is {found.world_size}: unset RANK, "
            "LOCAL_RANK and WORLD_SIZE, which another start has left over"
        )


def _scheduled(environment: Environment, readers: Sequence[Reader]) -> Rank | None:
    """Returns what MPI or a scheduler says of this process; None if they say nothing, or half of it."""
    for read in readers:
        with suppress(LaunchError):
            if (found := read(environment)) is not None:
                return found
    return None


def take_private_environment(environment: MutableMapping[str, str]) -> None:
    """Sets the variables in the file that MEGALITE_PRIVATE_ENVIRONMENT names. They override the host's own.

    Among them may be LD_PRELOAD or PYTHONPATH of the user, so the file must be one that nobody else can write or read.
    """
    if not (name := environment.get(PRIVATE)):
        return
    try:
        found = json.loads(read_small_file(Path(name), PRIVATE_BYTES, private=True))
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError("no JSON object of strings")
        environment.update(found)
    except UnsafeFile as error:
        raise LaunchError(
            f"{PRIVATE} must name a file of your own with mode 600, since its variables decide what ranks run: {error}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(
            f"{PRIVATE} names {name}, which cannot be read ({reason}): is the folder shared by all hosts?"
        ) from None


def _with_given(given: Mapping[str, int], found: Rank) -> Rank:
    """Applies variables set by hand. RANK and WORLD_SIZE must agree; the local rank, and so the device, is free."""
    for name, number in (("RANK", found.rank), ("WORLD_SIZE", found.world_size)):
        if given.get(name, number) != number:
            raise LaunchError(
                f"{name} is {given[name]}, but {found.launcher} has started this process as rank {found.rank} of "
                f"{found.world_size}: unset {name}, or start as many processes as it says"
            )
    return replace(found, local_rank=given.get("LOCAL_RANK", found.local_rank))


def _from_variables(environment: Environment, given: Mapping[str, int]) -> Rank:
    """Reads the variables of deepspeed, torchrun, or a user's own script."""
    of_world = given["RANK"], given["LOCAL_RANK"], given["WORLD_SIZE"]
    for launcher, hosts in (("deepspeed", "CROSS_SIZE"), ("torchrun", "GROUP_WORLD_SIZE")):
        if hosts in environment:
            return Rank(*of_world, launcher, _number(environment, hosts) > 1)
    local_sizes = [_number(environment, name) for name in LOCAL_SIZES if name in environment]
    return Rank(*of_world, "", min(local_sizes) < given["WORLD_SIZE"] if local_sizes else None)


def _from_open_mpi(environment: Environment) -> Rank | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")]
    rank, local_rank, size, local_size = _all(environment, "Open MPI", names)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    is_local = local_size == size
    master = ("127.0.0.1", slurm_rendezvous.port_of(zlib.crc32(job.encode()))) if is_local else NOWHERE
    return Rank(rank, local_rank, size, "Open MPI", not is_local, master)


def _from_pmi(environment: Environment) -> Rank | None:
    """Reads MPICH's hydra and Intel MPI. `srun --mpi=pmi2` also sets PMI_RANK, but none of the local-rank variables."""
    local = next((name for name in (*MPI_LOCAL_RANKS, "LOCAL_RANK") if name in environment), None)
    if "PMI_RANK" not in environment or (local in (None, "LOCAL_RANK") and slurm_rendezvous.is_step(environment)):
        return None
    rank, size = _all(environment, "MPI", ["PMI_RANK", "PMI_SIZE"])
    if local is None and size > 1:
        raise LaunchError(
            "PMI_RANK says which rank this is, and nothing says which one of its host: set LOCAL_RANK, or "
            "unset PMI_RANK if no launcher has started this"
        )
    several = _number(environment, "MPI_LOCALNRANKS") < size if "MPI_LOCALNRANKS" in environment else None
    return Rank(rank, _number(environment, local) if local else 0, size, "MPI", several)


def _from_slurm(environment: Environment) -> Rank | None:
    if not slurm_rendezvous.is_step(environment):
        return None
    names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID"]
    rank, local_rank, size, hosts, _ = _all(environment, "Slurm", names)
    if environment.get("CUDA_VISIBLE_DEVICES") and "," not in environment["CUDA_VISIBLE_DEVICES"]:
        local_rank = 0  # a task bound to one GPU sees only that
    return Rank(rank, local_rank, size, "Slurm", hosts > 1, slurm_rendezvous.master(environment))


def _from_pmix(environment: Environment) -> Rank | None:
    """Reads PMIx, which sets no variable for the number of ranks."""
    if "PMIX_RANK" not in environment:
        return None
    if "WORLD_SIZE" not in environment or not {"LOCAL_RANK", "PMIX_LOCAL_RANK"} & environment.keys():
        raise LaunchError(
            "PMIX_RANK says which rank this is, but not of how many: set LOCAL_RANK and WORLD_SIZE too, or unset "
            "PMIX_RANK if no launcher has started this"
        )
    local = "LOCAL_RANK" if "LOCAL_RANK" in environment else "PMIX_LOCAL_RANK"
    return Rank(
        _number(environment, "PMIX_RANK"), _number(environment, local), _number(environment, "WORLD_SIZE"), "PMIx"
    )


def _from_kubeflow(environment: Environment) -> Rank | None:
    """Reads a Kubeflow pod with one process, not started by torchrun, from the variables that torchrun reads."""
    if not {"PET_NODE_RANK", "PET_NNODES"} <= environment.keys():
        return None
    per_pod = environment.get("PET_NPROC_PER_NODE", "1")
    has_several = int(per_pod) > 1 if per_pod.isdecimal() else gpu_count() > 1
    if has_several or not environment["PET_NNODES"].isdecimal():
        if environment["PET_NNODES"] == "1":
            return None
        raise LaunchError(
            f"PET_NNODES is {environment['PET_NNODES']} and PET_NPROC_PER_NODE {per_pod}: let the pod's command be "
            "torchrun -m launch.train CONFIG.yaml, which starts its processes"
        )
    size = int(environment["PET_NNODES"])
    port = _number(environment, "PET_MASTER_PORT") if "PET_MASTER_PORT" in environment else DEFAULT_PORT
    master = (environment.get("PET_MASTER_ADDR", ""), port)
    return Rank(_number(environment, "PET_NODE_RANK"), 0, size, "Kubeflow", size > 1, master)


def _master(environment: Environment, found: Rank) -> tuple[str, int]:
    """Returns the rendezvous address and port; MASTER_ADDR and MASTER_PORT override what the launcher says."""
    address, port = found.master
    if not address and "MASTER_ADDR" not in environment:
        if found.world_size == 1:
            address, port = "127.0.0.1", free_port()
        elif found.has_several_hosts is False:
            address, port = "127.0.0.1", DEFAULT_PORT
        elif (step := _from_slurm(environment)) is not None and step.world_size == found.world_size:
            address, port = step.master  # a script has mapped Slurm's rank variables itself
    address = environment.get("MASTER_ADDR") or address
    if not address:
        raise LaunchError(
            "nothing says where the ranks meet: set MASTER_ADDR to the host of rank 0, on all hosts alike, or unset "
            "the variables of ranks if no launcher has started this"
        )
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else port or DEFAULT_PORT
    if not 0 < port < 1 << 16:
        raise LaunchError(f"MASTER_PORT is {port}, which is no port: set one from 1 to 65535, on all hosts alike")
    return address, port


def _all(environment: Environment, launcher: str, names: Sequence[str]) -> list[int]:
    missing = [name for name in names if name not in environment]
    if missing:
        raise LaunchError(
            f"{launcher} has set {names[0]} but not {_listed(missing)}: set RANK, LOCAL_RANK, WORLD_SIZE, or unset "
            f"{names[0]} if no launcher has started this"
        )
    return [_number(environment, name) for name in names]


def _number(environment: Environment, name: str) -> int:
    if not environment[name].isdecimal():
        raise LaunchError(f"environment variable {name} is {environment[name]!r}, not a whole number: unset it")
    return int(environment[name])


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
