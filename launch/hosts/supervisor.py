"""The supervisor of a run on several hosts: before each attempt it finds out which are fit, and chooses among them.

The first attempt must have what was asked for. A later one takes spare hosts for those that are lost, and with
`parallel.data_parallel_size: auto` goes on with fewer: the checkpoint fits any layout.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch.backends.deepspeed import (
    PLAIN,
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
from launch.doctor.findings import Settings
from launch.doctor.preflight import Report, preflight
from launch.errors import FAILED_CODE, LaunchError
from launch.hostfile import Host
from launch.hosts.attempt import HostsAttempt
from launch.hosts.choice import choose_hosts, wanted_ranks
from launch.hosts.connection import HostConnection, HostError, connect_all, in_parallel
from launch.hosts.watch import Watch
from launch.local import rank_environment
from launch.processes import StopSignals
from launch.silence import Watcher
from launch.supervise import Ended, Policy, Supervisor
from launch.topology import Topology
from megalite.config import Config

FOLDER = ".launch"  # in the run's folder: what the launcher of the last attempt was given
GUARD_S = 10.0


@dataclass(frozen=True)
class Options:
    """What `megalite launch` was asked for, besides hosts and config."""

    launcher: Launcher = Launcher.PDSH
    launcher_args: str = ""
    spares: int = 0  # of the hosts, the last so many are not used unless others are lost
    ssh_port: int | None = None
    host_timeout_s: float = 20.0  # without a sign of a host until it counts as lost
    topology: Topology | None = None


@dataclass(frozen=True)
class Team:
    """The hosts of one attempt, in rank order, and what they are."""

    hosts: tuple[Host, ...]
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
        self._world_size = wanted_ranks(config, hosts, options.spares)
        self._connections: dict[str, HostConnection] = {}
        self._attempts = 0
        self._began = time.monotonic()  # the last attempt
        self._last_team: tuple[str, ...] = ()
        self._notices: tuple[str, ...] = ()
        self._stuck: set[str] = set()  # hosts with a process that cannot be ended, which may hold their GPUs
        check_launcher(options.launcher, hosts)
        if not PLAIN.fullmatch(str(config.run_dir.absolute())):
            raise LaunchError(
                f"run_dir {config.run_dir.absolute()} has characters that shells on the hosts would change: name it "
                "with letters, digits and _ - . / alone"
            )

    def __enter__(self) -> HostsSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        in_parallel(list(self._connections), lambda name: self._connections[name].close())

    def _attempt(self, signals: StopSignals) -> Ended:
        self._attempts += 1
        try:
            team = self._gather()
            if signals.last is not None:
                return Ended(128 + signals.last)
            return self._run(team, signals)
        except LaunchError as error:
            if self._attempts == 1:
                raise
            return Ended(FAILED_CODE, str(error))

    def _gather(self) -> Team:
        """The hosts of the next attempt. Raises LaunchError where there are not enough that are fit."""
        settings = Settings.of(self._config)
        errors = self._connect()
        report = preflight(self._connections, errors, self._hosts, settings)
        if self._remove_own_locks(report):
            report = preflight(self._connections, errors, self._hosts, settings)
        if self._attempts == 1 or report.failures:
            self._show(report)
        for finding in report.failures:
            if not finding.hosts:
                raise LaunchError(f"the hosts cannot train together: {finding}")
        unfit = report.failed_hosts.keys() | self._stuck
        fit = [host for host in self._hosts if host.name not in unfit]
        choice = choose_hosts(
            self._config,
            fit,
            report.device,
            wanted=self._world_size,
            may_shrink=self._attempts > 1,
            keep_spares=self._options.spares > 0,
            topology=self._options.topology,
            why_not=report.failures,
        )
        for notice in choice.notices if choice.notices != self._notices else ():
            self._say(notice)
        hosts, self._notices = choice.hosts, choice.notices
        first = hosts[0].name
        meeting = Meeting(report.addresses[first], self._connections[first].ask("free_port")["port"])
        team = Team(hosts, report.device, min(report.facts[host.name]["cores"] for host in hosts), meeting)
        names = tuple(host.name for host in team.hosts)
        if names != self._last_team:
            self._say(f"hosts of this attempt, in rank order: {', '.join(names)}")
        self._last_team = names
        return team

    def _remove_own_locks(self, report: Report) -> bool:
        """Of torch's extension builder, that ranks of the attempt before left behind when they were killed."""
        if self._attempts == 1:
            return False
        seconds = time.monotonic() - self._began
        locks = [
            (name, Path(lock["path"]))
            for name, facts in report.facts.items()
            for lock in facts["locks"]
            if lock["holder"] is None and lock["age_s"] < seconds
        ]
        for name, path in locks:
            self._connections[name].ask("remove_token", folder=str(path.parent), name=path.name, made=[])
            self._say(f"removed {path} on {name}, which a killed compiler had left")
        return bool(locks)

    def _connect(self) -> dict[str, HostError]:
        """Tries all hosts that are not connected: one that was lost may be back."""
        for name in [name for name, connection in self._connections.items() if not connection.is_open]:
            self._connections.pop(name).close()
        missing = [host.name for host in self._hosts if host.name not in self._connections]
        made, errors = connect_all(missing, ssh_port=self._options.ssh_port)
        self._connections |= made
        return errors

    def _run(self, team: Team, signals: StopSignals) -> Ended:
        attempt, self._began = uuid.uuid4().hex, time.monotonic()
        connections = {host.name: self._connections[host.name] for host in team.hosts}
        environment, private = self._environment(team, attempt)
        guard = {
            "attempt": attempt,
            "lease_s": self._options.host_timeout_s,
            "grace_s": self._policy.grace_s,
            "private": private,
        }
        answers, errors = in_parallel(
            list(connections), lambda name: connections[name].ask("guard", timeout_s=GUARD_S, **guard)
        )
        for error in errors.values():
            raise error
        environment["MEGALITE_PRIVATE_ENVIRONMENT"] = next(iter(answers.values()))["private_environment"]
        command, own = self._command(team, environment)
        reconnect = partial(HostConnection, ssh_port=self._options.ssh_port)
        with (
            Watch(connections, guard, reconnect, self._options.host_timeout_s) as watch,
            Watcher(self._run_dir, attempt, self._policy.silence_s) as watcher,
        ):
            ended = HostsAttempt(command, own, watch, self._policy.grace_s, watcher.reason).run(signals)
            lost = watch.lost()
        self._connections |= connections  # some may be new
        in_parallel([name for name in connections if name not in lost], lambda name: connections[name].ask("release"))
        for name in lost:
            self._connections.pop(name).close()
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

    def _command(self, team: Team, environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """What starts the ranks, and what its own environment must have; writes the files it reads."""
        folder = (self._run_dir / FOLDER).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        config_path = folder / "config.yaml"
        config_path.write_text(self._config.to_yaml())
        if self._options.launcher is not Launcher.PDSH:  # MPI and srun set numbers alone
            environment |= {"MASTER_ADDR": team.meeting.address, "MASTER_PORT": str(team.meeting.port)}
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
        return command, launcher_environment(environment_file)
