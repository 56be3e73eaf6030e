"""The supervisor of a run on several hosts: before each attempt it finds out which are fit, and chooses among them.

The first attempt must have what was asked for. A later one takes spare hosts for those that are lost, and with
`parallel.data_parallel_size: auto` goes on with fewer: the checkpoint fits any layout. A layout that is `auto` is
chosen for the hosts of each attempt.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch.backends.deepspeed import (
    Launcher,
    Meeting,
    check_launcher,
    command_of,
    environment_of,
    launcher_environment,
    user_environment_files,
    write_files,
)
from launch.devices import Device
from launch.doctor.findings import Finding, Settings
from launch.doctor.preflight import Report, preflight
from launch.errors import FAILED_CODE, LaunchError
from launch.hostfile import Host
from launch.hosts.attempt import HostsAttempt, asked_code
from launch.hosts.choice import (
    NotEnoughHosts,
    choose_hosts,
    expected_device,
    per_node,
    unused_slots,
    wanted_ranks,
)
from launch.hosts.connection import HostConnection, HostError, connect_all, in_parallel
from launch.hosts.watch import Watch
from launch.local import rank_environment
from launch.plan.automatic import choose_on, hosts_cluster, most_ranks
from launch.processes import StopSignals
from launch.silence import Watcher
from launch.supervise import Ended, Policy, Supervisor, sleep
from launch.topology import Topology
from megalite.config import Config, ConfigError
from megalite.config.known_bad import check_known_bad, installed_versions
from megalite.planner.search import Ranks, first_legal

FOLDER = ".launch"  # in the run's folder: what the launcher of an attempt is given, while it lasts
LOOK_AGAIN_S = 10.0  # for hosts that boot
GUARD_S = 10.0


@dataclass(frozen=True)
class Options:
    """What `megalite launch` was asked for, besides hosts and config."""

    launcher: Launcher = Launcher.PDSH
    launcher_args: str = ""
    spares: int = 0  # of the hosts, the last so many are not used unless others are lost
    ssh_port: int | None = None
    host_timeout_s: float = 20.0  # without a sign of a host until it counts as lost
    wait_for_hosts_s: float = 600.0  # that a later attempt lacks
    topology: Topology | None = None


@dataclass(frozen=True)
class Team:
    """The hosts of one attempt, in rank order, and what they are."""

    hosts: tuple[Host, ...]
    config: Config  # with a layout
    device: Device
    cores: int  # of the host that has the fewest
    meeting: Meeting


class HostsSupervisor(Supervisor):
    """Use as `with HostsSupervisor(...) as supervisor: supervisor.run()`."""

    def __init__(
        self,
        config: Config,
        hosts: Sequence[Host],
        policy: Policy,
        options: Options,
        show: Callable[[Report], None],
    ) -> None:
        """`show` is given the report on the hosts before the first attempt, and any that keeps one out.

        Raises LaunchError or ConfigError where the hosts cannot hold the layout.
        """
        super().__init__(policy, config.run_dir, config.total_steps)
        self._config, self._hosts, self._options, self._show = config, tuple(hosts), options, show
        self._world_size = wanted_ranks(config, hosts, options.spares, expected_device())
        self._connections: dict[str, HostConnection] = {}
        self._attempts = 0
        self._began = time.monotonic()  # the last attempt
        self._last_team: tuple[str, ...] = ()
        self._notices: tuple[str, ...] = ()
        self._chosen: tuple[str, ...] = ()  # what was told about the last layout that was
        self._shown: tuple[Finding, ...] = ()
        self._stuck: set[str] = set()  # hosts with a process that cannot be ended, which may hold their GPUs

    def __enter__(self) -> HostsSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        in_parallel(list(self._connections), lambda name: self._connections[name].close())

    def _attempt(self, signals: StopSignals) -> Ended:
        self._attempts += 1
        try:
            team = self._wait_for_team(signals)
            if signals.last is not None:
                return Ended(asked_code(signals.last))
            return self._run(team, signals)
        except LaunchError as error:
            if signals.last is not None:
                return Ended(asked_code(signals.last))
            if self._attempts == 1:
                raise
            return Ended(FAILED_CODE, str(error), is_final=isinstance(error, NotEnoughHosts))

    def _wait_for_team(self, signals: StopSignals) -> Team:
        """The hosts of the next attempt; a later one waits for hosts that boot. Raises LaunchError."""
        patience_s = self._options.wait_for_hosts_s if self._attempts > 1 else 0.0
        deadline, said = time.monotonic() + patience_s, ""
        while True:
            try:
                return self._gather()
            except NotEnoughHosts as error:
                if time.monotonic() > deadline or signals.last is not None:
                    raise
                if str(error) != said:
                    said = str(error)
                    self._say(f"waiting for hosts: {said}")
                sleep(LOOK_AGAIN_S, signals)

    def _gather(self) -> Team:
        """Raises LaunchError, or NotEnoughHosts, which may pass."""
        settings = Settings.of(self._config)
        errors = self._connect()
        report = preflight(self._connections, errors, self._hosts, settings)
        if self._remove_own_locks(report):
            report = preflight(self._connections, errors, self._hosts, settings)
        if report.findings != self._shown and (self._attempts == 1 or report.failures):
            self._show(report)
        self._shown = report.findings
        for finding in report.failures:
            if not finding.hosts:
                raise LaunchError(f"the hosts cannot train together: {finding}")
        unfit = report.failed_hosts.keys() | self._stuck
        fit = [host for host in self._hosts if host.name not in unfit]
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
        for notice in choice.notices if choice.notices != self._notices else ():
            self._say(notice)
        self._notices = choice.notices
        check_launcher(self._options.launcher, choice.hosts, self._options.ssh_port)
        check_known_bad(config, choice.layout, installed_versions(), report.device)
        hosts = self._in_rank_order(choice.hosts, report)
        first = hosts[0].name
        meeting = Meeting(report.addresses[first], self._connections[first].ask("free_port")["port"])
        team = Team(hosts, config, report.device, min(report.facts[host.name]["cores"] for host in hosts), meeting)
        names = tuple(host.name for host in team.hosts)
        if names != self._last_team:
            self._say(f"hosts of this attempt, in rank order: {', '.join(names)}")
        self._last_team = names
        return team

    def _with_layout(self, fit: Sequence[Host], report: Report) -> tuple[Config, int]:
        """The config of an attempt, and its ranks. A layout that is auto is chosen for the hosts that are fit."""
        if not self._config.open:
            return self._config, self._world_size
        there, spares = sum(host.slots for host in fit), self._options.spares
        wanted = wanted_ranks(self._config, self._hosts, spares, report.device)
        if there < wanted and (self._attempts == 1 or not there):  # which `choose_hosts` tells, whatever the layout
            return first_legal(self._config, Ranks(wanted, per_node(self._hosts), report.device))[0], wanted
        try:
            if there >= wanted:
                said = unused_slots(self._config, self._hosts, spares, wanted, report.device)
            else:
                wanted = most_ranks(self._config, there, per_node(fit), report.device)
                said = unused_slots(self._config, fit, 0, wanted, report.device)
            gpus = [name for host in fit for name in report.facts[host.name]["gpus"]]
            chosen = choose_on(self._config, hosts_cluster([host.slots for host in fit], wanted, report.device, gpus))
        except (ConfigError, LaunchError) as error:
            if self._attempts == 1:
                raise
            raise NotEnoughHosts(f"there is no layout for the hosts that are fit: {error}") from None
        self._tell_chosen(*said, chosen.sentence)
        return self._config.settled(chosen.options), wanted

    def _tell_chosen(self, *sentences: str) -> None:
        """Once, while it stays the same."""
        for sentence in sentences if sentences != self._chosen else ():
            self._say(sentence)
        self._chosen = sentences

    def _remove_own_locks(self, report: Report) -> bool:
        """Of torch's extension builder, that ranks of the attempt before left behind when they were killed."""
        if self._attempts == 1:
            return False
        seconds = time.monotonic() - self._began
        locks = [(name, lock) for name, facts in report.facts.items() for lock in facts["locks"]]
        held = {lock["path"] for _, lock in locks if lock["holder"] is not None}  # on shared storage all hosts see it
        left = {lock["path"]: name for name, lock in locks if lock["path"] not in held and lock["age_s"] < seconds}
        for text, name in left.items():
            path = Path(text)
            self._connections[name].ask("remove_token", folder=str(path.parent), name=path.name, made=[])
            self._say(f"removed {path} on {name}, which a killed compiler had left")
        return bool(left)

    def _in_rank_order(self, hosts: tuple[Host, ...], report: Report) -> tuple[Host, ...]:
        """Open MPI puts this machine's ranks first, wherever the hostfile has it."""
        if self._options.launcher is Launcher.OPENMPI:
            here = [host for host in hosts if report.facts[host.name]["hostname"] == socket.gethostname()]
            return (*here, *(host for host in hosts if host not in here))
        return hosts

    def _connect(self) -> dict[str, HostError]:
        """Tries all hosts that are not connected: one that was lost may be back."""
        for name in [name for name, connection in self._connections.items() if not connection.is_open]:
            self._connections.pop(name).close()
        missing = [host.name for host in self._hosts if host.name not in self._connections]
        made, errors = connect_all(missing, ssh_port=self._options.ssh_port, patience_s=self._options.host_timeout_s)
        self._connections |= made
        self._stuck -= made.keys()  # it has booted
        return errors

    def _run(self, team: Team, signals: StopSignals) -> Ended:
        attempt, self._began = uuid.uuid4().hex, time.monotonic()
        connections = {host.name: self._connections[host.name] for host in team.hosts}
        environment, private = self._environment(team, attempt)
        guard = {
            "attempt": attempt,
            "lease_s": self._options.host_timeout_s,
            "private": private,
        }
        answers, errors = in_parallel(
            list(connections), lambda name: connections[name].ask("guard", timeout_s=GUARD_S, **guard)
        )
        for error in errors.values():
            in_parallel(list(answers), lambda name: connections[name].ask("release"))
            raise error
        environment["MEGALITE_PRIVATE_ENVIRONMENT"] = next(iter(answers.values()))["private_environment"]
        folder = (self._run_dir / FOLDER / attempt).absolute()
        command, own = self._command(team, environment, folder)
        reconnect = partial(HostConnection, ssh_port=self._options.ssh_port, patience_s=self._options.host_timeout_s)
        with (
            Watch(connections, guard, reconnect, self._options.host_timeout_s) as watch,
            Watcher(self._run_dir, attempt, self._policy.silence_s) as watcher,
        ):
            ended = HostsAttempt(command, own, watch, self._policy.grace_s, watcher.reason).run(signals)
            lost = watch.lost()
        shutil.rmtree(folder, ignore_errors=True)
        self._connections |= connections  # some may be new
        in_parallel([name for name in connections if name not in lost], lambda name: connections[name].ask("release"))
        for name in lost:
            self._connections.pop(name).close()
        if lost and ended.reason is None and ended.code:
            ended = replace(ended, reason=f"{', '.join(lost)} could not be reached any more")
        self._stuck |= set(ended.facts.get("stuck", []))
        facts = {"id": attempt, "hosts": {host.name: host.slots for host in team.hosts}, "lost": lost}
        return replace(ended, facts=facts | ended.facts)

    def _environment(self, team: Team, attempt: str) -> tuple[dict[str, str], dict[str, str]]:
        """Variables for command lines, and those for the ranks' eyes alone."""
        ranks = max(host.slots for host in team.hosts)
        own, _ = rank_environment(self._config.launch, ranks, team.device == "cuda", cores=team.cores)
        given = environment_of(os.environ, user_environment_files(os.environ))
        shown = own | given.shown | {"MEGALITE_ATTEMPT": attempt}
        return shown, given.private

    def _command(self, team: Team, environment: dict[str, str], folder: Path) -> tuple[list[str], dict[str, str]]:
        """What starts the ranks, and what its own environment must have; writes the files it reads."""
        folder.mkdir(parents=True)
        config_path = folder / "config.yaml"
        config_path.write_text(team.config.to_yaml())
        if self._options.launcher is not Launcher.PDSH:  # MPI and srun set numbers alone, and mpirun makes a terminal
            environment |= {"MASTER_ADDR": team.meeting.address, "MASTER_PORT": str(team.meeting.port)}
            environment["TTY_COMPATIBLE"] = "0"
        hostfile, environment_file = write_files(folder, team.hosts, environment)
        command = command_of(
            self._options.launcher,
            team.hosts,
            team.meeting,
            hostfile,
            config_path,
            ssh_port=self._options.ssh_port,
            launcher_args=self._options.launcher_args,
        )
        return command, launcher_environment(environment_file, self._options.host_timeout_s)
