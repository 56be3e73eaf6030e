"""Supervises a run on several hosts: checks them before each attempt and chooses among those that pass.

The first attempt needs everything that was asked for. A later one replaces lost hosts by spare ones, and with
`parallel.data_parallel_size: auto` goes on with fewer, because a checkpoint fits any layout. A layout that is `auto` is
chosen again for the hosts of each attempt.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch.cluster.attempt import HostMonitor, HostsAttempt
from launch.cluster.deepspeed_launcher import (
    EXPORTED,
    FOLDER,
    Launcher,
    check_launcher,
    launcher_command,
    launcher_environment,
    write_files,
)
from launch.cluster.doctor.findings import FAIL, OK, Finding, Settings
from launch.cluster.doctor.preflight import PreflightReport, preflight
from launch.cluster.host_selection import (
    Choice,
    NotEnoughHosts,
    address_of_rank_0,
    check_memory_of_hosts,
    choose_hosts,
    expected_device,
    per_node,
    unused_slots,
    wanted_ranks,
)
from launch.cluster.ssh.connection import HostConnection, HostError, connect_all, in_parallel
from launch.cluster.switch_topology import Topology
from launch.errors import FAILED_CODE, LaunchError
from launch.prediction.auto_layout import choose_on, hosts_cluster, most_ranks
from launch.runtime.devices import Device
from launch.runtime.forwarded_environment import environment_notices, forwarded_environment, user_environment_files
from launch.runtime.hostfile import Host
from launch.runtime.import_path import import_variables
from launch.runtime.local_ranks import rank_settings
from launch.runtime.logs import get_logger
from launch.runtime.processes import StopSignals
from launch.runtime.rank_environment import PRIVATE
from launch.runtime.run_lock import is_locked, lock_holder
from launch.runtime.start_witness import FIRST_CODE
from launch.supervision.liveness import HeartbeatMonitor
from launch.supervision.supervisor import AttemptEnd, Policy, Supervisor, sleep
from launch.trainer.start.flags import NO_FLAGS, StartFlags
from launch.trainer.start.run_folder import make_run_folder
from megalite.checkpoint.safe_files import make_folder
from megalite.config import Config, ConfigError
from megalite.config.rules.known_bad import check_known_bad, installed_versions
from megalite.distributed.rank_admission import ATTEMPT, SECRET, new_secret
from megalite.planner.search import Ranks, first_legal
from megalite.resilience.signals import exit_code_for

log = get_logger(__name__)

RETRY_S = 10.0  # between two searches for hosts that boot
GUARD_S = 10.0


@dataclass(frozen=True)
class Options:
    """Options of `megalite launch` besides hosts and config."""

    launcher: Launcher = "pdsh"
    launcher_args: str = ""
    spares: int = 0  # the last hosts of the list, used only if others are lost
    ssh_port: int | None = None
    host_timeout_s: float = 20.0  # without an answer until a host counts as lost
    wait_for_hosts_s: float = 600.0  # that a restart waits for missing hosts
    topology: Topology | None = None
    flags: StartFlags = NO_FLAGS


@dataclass(frozen=True)
class HostAssignment:
    """Hosts of one attempt in rank order, and the configuration of the ranks on them."""

    hosts: tuple[Host, ...]
    config: Config  # with a resolved layout
    device: Device
    cores: int  # of the host with the fewest
    master: tuple[str, int]  # address and port at which the ranks find each other


class HostsSupervisor(Supervisor):
    """Restarts a run on several hosts. Use as `with HostsSupervisor(...) as supervisor: supervisor.run()`."""

    def __init__(self, config: Config, hosts: Sequence[Host], policy: Policy, options: Options) -> None:
        """Raises LaunchError or ConfigError if the layout does not fit these hosts."""
        super().__init__(policy, config.run_dir, config)
        self._config, self._hosts, self._options = config, tuple(hosts), options
        self._world_size = wanted_ranks(config, hosts, options.spares, expected_device())
        self._connections: dict[str, HostConnection] = {}
        self._attempts = 0
        self._began = time.monotonic()  # start of the last attempt
        self._logged: dict[str, Sequence[str]] = {}  # subject -> notices of the last attempt
        self._shown_findings: tuple[Finding, ...] = ()
        self._stuck: set[str] = set()  # hosts with a process that cannot be killed and may hold GPUs

    def __enter__(self) -> HostsSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        in_parallel(list(self._connections), lambda name: self._connections[name].close())

    def _attempt(self, signals: StopSignals) -> AttemptEnd:
        self._attempts += 1
        try:
            assignment = self._wait_for_hosts(signals)
            if signals.last is None:
                return self._run(assignment, signals)
        except LaunchError as error:
            if signals.last is None and self._attempts == 1:
                raise
            if signals.last is None:
                return AttemptEnd(FAILED_CODE, str(error), is_final=isinstance(error, NotEnoughHosts))
        return AttemptEnd(exit_code_for(signals.last or signal.SIGTERM))  # nothing to save

    def _wait_for_hosts(self, signals: StopSignals) -> HostAssignment:
        """Returns the hosts of the next attempt; a restart waits for hosts that boot. Raises LaunchError."""
        patience_s = self._options.wait_for_hosts_s if self._attempts > 1 else 0.0
        deadline, logged = time.monotonic() + patience_s, ""
        while True:
            try:
                return self._assign_hosts()
            except NotEnoughHosts as error:
                if time.monotonic() > deadline or signals.last is not None:
                    raise
                if str(error) != logged:
                    logged = str(error)
                    self._log(f"waiting for hosts: {logged}")
                sleep(RETRY_S, signals)

    def _assign_hosts(self) -> HostAssignment:
        """Checks all hosts and chooses among them. Raises LaunchError, or NotEnoughHosts, which may pass."""
        settings = Settings.of(self._config)
        errors = self._connect()
        report = preflight(self._connections, errors, self._hosts, settings)
        if self._remove_stale_locks(report):
            report = preflight(self._connections, errors, self._hosts, settings)
        unfit = self._stuck.union(report.failed_hosts)
        fit = [host for host in self._hosts if host.name not in unfit]
        is_refused = self._attempts == 1 and sum(host.slots for host in fit) < self._world_size
        doubts = [finding for finding in report.findings if finding.verdict != OK]
        if not (is_refused and doubts == report.failures[:1]):  # else the error says all that there is to say
            self._show(report)
        for finding in report.failures:
            if not finding.hosts:
                raise LaunchError(f"the hosts cannot train together: {finding}")
        config, wanted = self._with_layout(fit, report)
        choice = choose_hosts(
            config,
            fit,
            report.device,
            wanted=wanted,
            may_shrink=self._attempts > 1,
            spares=self._options.spares,
            topology=self._options.topology,
            why_not=report.failures,
        )
        self._log_if_new("hosts", choice.notices)
        check_launcher(self._options.launcher, choice.hosts, self._options.ssh_port)
        check_known_bad(config, choice.layout, installed_versions(), report.device)
        if not self._options.flags.force:
            self._check_memory(config, choice, report, is_short=len(fit) < len(self._hosts))
        hosts = choice.hosts
        if self._options.launcher == "openmpi":  # it puts the ranks of this machine first
            here = [host for host in hosts if report.facts[host.name]["hostname"] == socket.gethostname()]
            hosts = (*here, *(host for host in hosts if host not in here))
        first = hosts[0].name
        address = address_of_rank_0(hosts, config.launch.interface, report)
        master = (address, self._connections[first].ask("free_port")["port"])
        names = [host.name for host in hosts]
        self._log_if_new("order", [f"hosts of this attempt, in rank order: {', '.join(names)}"])
        cores = min(report.facts[name]["cores"] for name in names)
        return HostAssignment(hosts, config, report.device, cores, master)

    def _show(self, report: PreflightReport) -> None:
        """Logs the findings about hosts, unless the attempt before had the same ones."""
        if report.findings != self._shown_findings and (self._attempts == 1 or report.failures):
            log.log(logging.INFO if report.passed else logging.WARNING, "%s", report.conclusion())
            for finding in report.findings:
                if finding.verdict != OK:
                    log.warning("%s%s: %s", finding.check, " failed" if finding.verdict == FAIL else "", finding)
        self._shown_findings = report.findings

    def _check_memory(self, config: Config, choice: Choice, report: PreflightReport, *, is_short: bool) -> None:
        """Raises LaunchError where the run cannot fit; NotEnoughHosts where hosts are missing that may come back."""
        shown, private = forwarded_environment(os.environ, user_environment_files(os.environ))
        own, _ = rank_settings(config.launch, max(host.slots for host in choice.hosts), report.device == "cuda")
        try:
            check_memory_of_hosts(config, choice, report.facts, report.device, own | shown | private)
        except LaunchError as error:
            if self._attempts == 1 or not is_short:
                raise
            raise NotEnoughHosts(f"the run does not fit the hosts that are left: {error}") from None

    def _log_if_new(self, subject: str, notices: Sequence[str]) -> None:
        """Logs the notices of an attempt on a subject, unless the attempt before had the same ones."""
        for notice in notices if notices != self._logged.get(subject) else ():
            self._log(notice, logging.INFO)
        self._logged[subject] = notices

    def _with_layout(self, fit: Sequence[Host], report: PreflightReport) -> tuple[Config, int]:
        """Returns the config of an attempt and its ranks. A layout that is auto is chosen for the hosts in `fit`."""
        if not self._config.unresolved_options:
            return self._config, self._world_size
        slots, spares = sum(host.slots for host in fit), self._options.spares
        wanted = wanted_ranks(self._config, self._hosts, spares, report.device)
        if slots < wanted and (self._attempts == 1 or not slots):  # `choose_hosts` will reject any layout
            return first_legal(self._config, Ranks(wanted, per_node(self._hosts), report.device))[0], wanted
        try:
            if slots >= wanted:
                notices = unused_slots(self._config, self._hosts, spares, wanted, report.device)
            else:
                wanted = most_ranks(self._config, slots, per_node(fit), report.device)
                notices = unused_slots(self._config, fit, 0, wanted, report.device)
            gpus = [name for host in fit for name in report.facts[host.name]["gpus"]]
            chosen = choose_on(self._config, hosts_cluster([host.slots for host in fit], wanted, report.device, gpus))
        except (ConfigError, LaunchError) as error:
            if self._attempts == 1:
                raise
            raise NotEnoughHosts(f"there is no layout for the hosts that are fit: {error}") from None
        self._log_if_new("layout", [*notices, chosen.sentence])
        return self._config.with_resolved(chosen.options), wanted

    def _remove_stale_locks(self, report: PreflightReport) -> bool:
        """Removes locks of torch's extension builder that killed ranks of the last attempt left; returns if any."""
        if self._attempts == 1:
            return False
        seconds = time.monotonic() - self._began
        locks = [(name, lock) for name, facts in report.facts.items() for lock in facts["locks"]]
        held = {lock["path"] for _, lock in locks if lock["holder"] is not None}  # the holder may be another host
        stale = [lock for lock in locks if lock[1]["age_s"] < seconds and lock[1]["path"] not in held]
        left = {lock["path"]: name for name, lock in stale if lock["is_own"]}
        for path, name in left.items():
            if self._connections[name].ask("remove_lock", path=path)["removed"]:
                self._log(f"removed {path} on {name}, which a killed compiler had left")
        return bool(left)

    def _connect(self) -> dict[str, HostError]:
        """Connects to all hosts without a connection, since a lost one may be back. Returns why the others fail."""
        for name in [name for name, connection in self._connections.items() if not connection.is_open]:
            self._connections.pop(name).close()
        missing = [host.name for host in self._hosts if host.name not in self._connections]
        made, errors = connect_all(missing, ssh_port=self._options.ssh_port, patience_s=self._options.host_timeout_s)
        self._connections |= made
        self._stuck -= made.keys()  # they have rebooted
        return errors

    def _run(self, assignment: HostAssignment, signals: StopSignals) -> AttemptEnd:
        attempt, self._began = uuid.uuid4().hex, time.monotonic()
        if self._attempts > 1 and is_locked(self._run_dir) and (holder := lock_holder(self._run_dir)) is not None:
            self._log(
                f"process {holder.process} on {holder.host}, of an attempt before, still has the lock of "
                f"{self._run_dir}: ranks wait for it; if that host is frozen, end the process or power the host off"
            )
        lease_s = self._options.host_timeout_s
        connections = {host.name: self._connections[host.name] for host in assignment.hosts}
        files = user_environment_files(os.environ)
        shown, private = forwarded_environment(os.environ, files, also=EXPORTED)
        self._log_if_new("environment", environment_notices(files, private))
        private |= {SECRET: new_secret()}
        guard = {"attempt": attempt, "lease_s": lease_s, "private": private}
        answers, errors = in_parallel(
            list(connections), lambda name: connections[name].ask("guard", timeout_s=GUARD_S, **guard)
        )
        for error in errors.values():
            in_parallel(list(answers), lambda name: connections[name].ask("release"))
            raise error
        folder = (self._run_dir / FOLDER / attempt).absolute()
        # in the file that DeepSpeed reads, PYTHONPATH replaces the one that begins with the current folder
        shown = import_variables(os.environ) | shown | {ATTEMPT: attempt}
        shown |= {PRIVATE: next(iter(answers.values()))["private_environment"], FIRST_CODE: str(folder / "first_code")}
        command, environment = self._command(assignment, shown, folder), launcher_environment(folder, lease_s, shown)
        reconnect = partial(HostConnection, ssh_port=self._options.ssh_port, patience_s=lease_s)
        with (
            HostMonitor(connections, guard, reconnect, lease_s) as monitor,
            HeartbeatMonitor(
                self._run_dir,
                attempt,
                self._policy.heartbeat_timeout_s,
                world_size=sum(one.slots for one in assignment.hosts),
            ) as heartbeats,
        ):
            ended = HostsAttempt(
                command, environment, monitor, self._policy.grace_s, heartbeats.reason, self._has_started
            ).run(signals)
            lost = monitor.lost()
        if ended.code == 0 and (folder / "first_code").exists():  # DeepSpeed's helper under MPICH ends with 0
            ended = replace(ended, code=int((folder / "first_code").read_text() or FAILED_CODE))
        shutil.rmtree(folder, ignore_errors=True)
        self._connections |= connections  # the monitor may have reconnected
        in_parallel(connections.keys() - lost - monitor.unkilled, lambda name: connections[name].ask("release"))
        for name in lost:
            self._connections.pop(name).close()
        if lost and ended.reason is None and ended.code:
            ended = replace(ended, reason=f"{', '.join(lost)} could not be reached any more")
        self._stuck |= set(ended.facts.get("stuck", []))
        facts = {"id": attempt, "hosts": {host.name: host.slots for host in assignment.hosts}, "lost": lost}
        return replace(ended, facts=facts | ended.facts)

    def _has_started(self) -> bool:
        """Returns whether the ranks of this attempt have met; true if the run's folder does not tell."""
        now = self._read_progress()
        return now is None or now.has_new_session(self._progress)

    def _command(self, assignment: HostAssignment, shown: dict[str, str], folder: Path) -> list[str]:
        """Writes the files of the launcher and returns its command line; `shown` are variables that all may see."""
        options, hosts, (address, port) = self._options, assignment.hosts, assignment.master
        ranks = max(host.slots for host in hosts)
        own, _ = rank_settings(self._config.launch, ranks, assignment.device == "cuda", cores=assignment.cores)
        if options.launcher != "pdsh":  # MPI and srun set only rank numbers, and mpirun makes a terminal
            shown = shown | {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TTY_COMPATIBLE": "0"}
        make_run_folder(self._run_dir, shared=options.flags.shared_run_dir)
        make_folder(folder.parent, private=True)
        write_files(folder, hosts, own | shown, assignment.config)
        return launcher_command(
            options.launcher,
            hosts,
            assignment.master,
            folder,
            ssh_port=options.ssh_port,
            launcher_args=options.launcher_args,
            flags=options.flags,
        )
