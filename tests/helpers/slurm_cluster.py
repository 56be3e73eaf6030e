"""Slurm on the hosts of a test: slurmctld on `head`, a slurmd on each of the others, munge for all; no accounting.

In: how many hosts. Out: a `SlurmCluster` whose nodes are idle when it is entered; commands of Slurm run on its head.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.helpers.cluster_machine import PATH
from tests.helpers.hosts import Cluster

PROGRAMS_NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
START_S = 30.0
CORES, MEMORY_MIB, GPUS = 8, 1000, 2  # of a node, as Slurm is told

CONFIGURATION = """
ClusterName=test
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_delay_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout={node_timeout_s}
KillWait={kill_wait_s}
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
{topology_plugin}
NodeName={nodes} CPUs={cores} RealMemory={memory_mib} Gres=gpu:{gpus}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class SlurmCluster:
    """`node1` to `nodeN` under Slurm, up inside `with`. Partition `high` preempts `low`, which is the default.

    Slurm's usual times are minutes: that until a host which does not answer is given up is `node_timeout_s`, and that
    until a requeued job may start `requeue_delay_s` (of which Slurm makes the life of its credentials). `topology` are
    the lines of its topology.conf.
    """

    def __init__(
        self,
        n: int = 2,
        *,
        node_timeout_s: int = 15,
        kill_wait_s: int = 30,
        requeue_delay_s: int = 5,
        topology: str = "",
    ) -> None:
        self.cluster = Cluster(n)
        self._n = n
        self._topology = topology
        self._times = {"node_timeout_s": node_timeout_s, "kill_wait_s": kill_wait_s, "requeue_delay_s": requeue_delay_s}
        self._folder = Path()

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short, for a socket
            self._folder.chmod(0o755)
            self._configure()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all hosts, and Slurm with them."""
        self.cluster.close()
        if self._folder.name:
            shutil.rmtree(self._folder)
            self._folder = Path()

    @property
    def environment(self) -> dict[str, str]:
        """For commands on its hosts: with Slurm's configuration, and programs that only root has on its PATH."""
        return {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": PATH}

    def run(self, *words: str | Path, **variables: str) -> str:
        """A command on the head, which must succeed; what it says on stdout."""
        done = self.cluster.hosts["head"].run(words, env=self.environment | variables)
        assert done.returncode == 0, f"{done}\n{self.said()}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` knows of it."""
        return dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", number).split())

    def idle_nodes(self) -> list[str]:
        """Those that a job can have."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %t").splitlines()
        return [name for name, state in map(str.split, lines) if state == "idle"]

    def start_slurmd(self, name: str) -> None:
        """On a host that has booted."""
        self._daemon(name, "slurmd", "-D", "-N", name)

    def wait_until(self, condition: Callable[[], bool], within_s: float) -> None:
        """Returns once it holds; fails, with what Slurm has said, where it takes longer."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s:g} s\n{self.said()}"
            time.sleep(0.1)

    def said(self) -> str:
        """The end of Slurm's logs."""
        logs = sorted(self._folder.glob("*.log"))
        return "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _configure(self) -> None:
        values = {
            "folder": self._folder,
            "head": self.cluster.hosts["head"].ip,
            "nodes": f"node[1-{self._n}]",
            "cores": CORES,
            "memory_mib": MEMORY_MIB,
            "gpus": GPUS,
            "topology_plugin": "TopologyPlugin=topology/tree" if self._topology else "",
        }
        (self._folder / "state").mkdir()
        (self._folder / "slurm.conf").write_text(CONFIGURATION.format(**values, **self._times))
        (self._folder / "topology.conf").write_text(self._topology)
        (self._folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        for number in range(GPUS):
            (self._folder / f"gpu{number}").touch()
        files = f"{self._folder}/gpu[0-{GPUS - 1}]"
        (self._folder / "gres.conf").write_text(f"NodeName=node[1-{self._n}] Name=gpu File={files}\n")
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _start(self) -> None:
        own = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        words = [f"--{option}={self._folder / name}" for option, name in own.items()]
        self._daemon("head", "munged", "--foreground", "--force", *words, f"--seed-file={self._folder / 'munge.seed'}")
        self.wait_until((self._folder / "munge.socket").exists, START_S)
        self._daemon("head", "slurmctld", "-D", "-i")
        for name in self.cluster.names:
            self.start_slurmd(name)
        self.wait_until(lambda: self._is_up() and len(self.idle_nodes()) == self._n, START_S)

    def _is_up(self) -> bool:
        return self.cluster.hosts["head"].run(["sinfo"], env=self.environment).returncode == 0

    def _daemon(self, host: str, *words: str) -> None:
        with (self._folder / f"{words[0]}.{host}.log").open("a") as log:
            self.cluster.hosts[host].popen(words, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
