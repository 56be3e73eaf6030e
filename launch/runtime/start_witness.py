"""A small process beside a rank, until the first step, that tells the ranks of other hosts when its rank has failed.

A rank that is killed, runs out of memory or lacks a package cannot tell anybody, and not every launcher of several
hosts notices; MPI's do. Its witness sees that the pipe between them is closed, and leaves the failure where the ranks
meet (megalite/distributed/start_failures.py). It imports torch only then, and nothing of ours before that a rank may
lack. A rank that has met the others leaves its failure there itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from launch.runtime import slurm_rendezvous
from launch.runtime.printing import say
from launch.runtime.started_modules import START_WITNESS, python_command
from megalite.distributed.rank_admission import FOLDER, is_loopback_address

# by these a supervisor knows a rank (launch/cluster/ssh/agent.py), which a witness is not
NUMBERS = ("RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
SIZES = ("WORLD_SIZE", "PET_NNODES")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
# of Open MPI and of hydra (MPICH, Intel MPI), whose mpirun ends all ranks when one has failed, and of such an srun;
# but between hydra and ranks with a RANK stands a program of DeepSpeed's, which ends with 0 whatever its rank does
ALL_END = {"OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"}
KILLS_ALL = "SLURM_KILL_BAD_EXIT"
RESTARTS, MOST_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
PATIENCE_S = 60.0  # for the ranks of other hosts to hear of a failure
SILENT_S = 2.0  # by which a rank that says why it fails is ahead of those that a launcher then ends
TELLING_S = 20.0  # that a rank stays for its witness to tell, as containers end with their first process
SAY_S = 3.0  # of them without a word
# names a file for the exit code of the first rank that fails, if a launcher loses it
FIRST_CODE = "MEGALITE_FIRST_CODE"
KILLED = "its process was ended, by a signal or because memory ran out: its own output and `dmesg` may say why"


class StartWitness:
    """The witness of this process, if other hosts may have ranks of the same run."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._speaks = False
        self.has_told = False  # that this rank fails
        self.note: Callable[[int, str], bool] | None = None  # tells the others by itself where they have met

    def begin(self, environment: Mapping[str, str]) -> None:
        """Starts the witness, once, unless the variables say that all ranks are on this host or torchrun restarts."""
        if self._process is not None or not _may_be_missed(environment):
            return
        own = {name: value for name, value in environment.items() if name not in NUMBERS}
        self._speaks = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")) == "0"
        try:
            self._process = subprocess.Popen(
                python_command(START_WITNESS),
                env=own | {"TORCH_CPP_LOG_LEVEL": "FATAL"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # whoever reads what the rank says shall not wait for its witness
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # no process or no memory: the run itself may still start
            return
        os.register_at_fork(after_in_child=self._close_pipe)  # else a forked child would keep it open
        sys.excepthook = self._report_exception  # of imports: a package is missing here
        self.update(environment)

    def update(self, environment: Mapping[str, str]) -> None:
        """Tells the witness the variables that say where the ranks meet."""
        self._send({"environment": dict(environment)})

    def fail(self, code: int, text: str, of: tuple[int, str] | None = None) -> None:
        """Tells the others why this rank ends; `of` names the rank and the host that have failed, if not this one."""
        if not self.has_told:
            self.has_told = True
            if path := os.environ.get(FIRST_CODE):
                with contextlib.suppress(OSError), Path(path).open("x") as file:
                    file.write(str(code))
            is_heard = self.note is not None and of is None and self.note(code, text)
            self._send({} if is_heard else {"code": code, "text": text, "of": of})

    def end(self) -> None:
        """Waits until a failure is told, or lets the witness end without a word."""
        self.note = None
        if self._process is None:
            return
        if not self.has_told:
            self._send({})
        self._close_pipe()
        try:
            self._process.wait(SAY_S)
        except subprocess.TimeoutExpired:
            if not self.has_told:
                self._process.kill()
            else:
                self._wait_longer(self._process)
        self._process = None

    def _wait_longer(self, process: subprocess.Popen[bytes]) -> None:
        if self._speaks:
            left_s = f"{TELLING_S - SAY_S:.0f} s"
            say(f"megalite: telling the ranks of other hosts why this one ends: {left_s} at most", file=sys.stderr)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on by itself, where whoever started us lets it
            process.wait(TELLING_S - SAY_S)

    def _report_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.fail(1, f"{kind.__name__}: {error}")
        sys.__excepthook__(kind, error, trace)
        self.end()

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
            except OSError:  # it was killed
                self._close_pipe()

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _may_be_missed(environment: Mapping[str, str]) -> bool:
    """Returns whether other hosts may wait for this rank when it has failed, and nobody starts it again."""
    step_size = environment.get("SLURM_STEP_NUM_TASKS", "1") if slurm_rendezvous.is_step(environment) else "1"
    size = next((environment[name] for name in SIZES if name in environment), step_size)
    local_size = next((environment[name] for name in LOCAL_SIZES if name in environment), "")
    is_here = is_loopback_address(environment.get("MASTER_ADDR", ""))  # where no other host reaches rank 0
    is_of_mpi = bool(ALL_END & environment.keys()) and "RANK" not in environment
    is_ended_by_others = is_of_mpi or environment.get(KILLS_ALL) == "1"
    is_among_others = FOLDER not in environment and size not in ("1", local_size) and not is_here
    return is_among_others and not will_be_restarted(environment) and not is_ended_by_others


def will_be_restarted(environment: Mapping[str, str]) -> bool:
    """Returns whether torchrun starts a rank that fails again. A failure must not stay in its store, which goes on."""
    return RESTARTS in environment and environment[RESTARTS] != environment.get(MOST_RESTARTS, "0")


def main(messages: IO[str]) -> None:
    """Reads what the rank says, to the end of the rank, and tells its failure."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # of a launcher that ends what is left of a host
    failure: dict[str, Any] = {"code": 1, "text": KILLED, "of": None}
    for line in messages:
        message = json.loads(line)
        if "environment" in message:
            os.environ.update(message["environment"])
        elif message:
            failure = message
            break
        else:
            return
    else:
        time.sleep(SILENT_S)
    _tell(failure)


def _tell(failure: dict[str, Any]) -> None:
    try:
        from launch.runtime.rank_environment import set_rank_variables, take_private_environment

        take_private_environment(os.environ)  # as the rank, which may have failed before
        set_rank_variables()
    except Exception:  # a package is missing; launchers other than Slurm have set what torch reads
        slurm_rendezvous.set_variables(os.environ)
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return
    from megalite.distributed.start_failures import StartFailure, note_failure

    rank, host = failure["of"] or (int(os.environ["RANK"]), socket.gethostname())
    note_failure(StartFailure(rank, host, failure["code"], failure["text"]), os.environ, PATIENCE_S)


witness = StartWitness()

if __name__ == "__main__":
    main(sys.stdin)
