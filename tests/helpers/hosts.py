"""Hosts on one machine: each with a name, an address, processes, /dev/shm and an sshd of its own, made of namespaces.

In: how many, and which of them are special. Out: a `Cluster`, usable as soon as it is entered, with a host `head` to
start commands from. Its hosts reach one another by name, through a switch that nothing else is plugged into. They
share all files, as over a network file system, but for /run, /dev/shm, /etc/hosts, /etc/ssh, root's .ssh and .bashrc
and what `private_directory` takes out. The machine itself is not changed, not even by a file, and nothing outlives the
process that made a cluster.
Linux and root only: tests/helpers/cluster_machine.py says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.helpers.cluster_machine import PATH
from tests.helpers.process_table import (
    PATIENCE_S,
    children,
    command_line,
    environment,
    members,
    pid_namespace,
    state,
    wait_until,
)
from tests.helpers.switch import UNTIL_WE_DIE, Switch

SUBNET = "10.77.0"
FIRST_ADDRESS = 11
KEEPER = ("--fork", "--kill-child", "--mount-proc")  # options of unshare
HOST = """
set -e
hostname "$NAME"
mount --bind /run/ssh /etc/ssh
mount --bind "/run/hosts.$NAME" /etc/hosts
mount --bind /run/shadow /etc/shadow
if test -d ~root/.ssh; then mount -t tmpfs -o mode=700 tmpfs ~root/.ssh; fi
if test -f ~root/.bashrc; then mount --bind /dev/null ~root/.bashrc; fi
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd /run/lock /run/cgroup
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t sysfs sysfs /sys
mount --move /run/cgroup /sys/fs/cgroup
ip link set lo up
echo ready
read -r plugged
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
exec "$(command -v sshd)" -D -e < /dev/null >&2
"""

REACHED = 'for address; do until (exec 3<> "/dev/tcp/$address/22") 2> /dev/null; do sleep 0.01; done; done'


@dataclass(frozen=True)
class HostedProcess:
    """A process that lives on a host."""

    host: str
    pid: int  # as the machine, not the host, counts
    command: str


class HostCommand(subprocess.Popen[str]):
    """A command on a host. Signals reach its own process; `pid` is the process outside that waits for it.

    As `subprocess.Popen`, but a test that fails inside its `with` block does not wait for it.
    """

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)

    @property
    def inside(self) -> int | None:
        """The command's own process, as the machine counts; None once it has ended."""
        wait_until(lambda: children(self.pid) or self.poll() is not None)
        return next(iter(children(self.pid)), None)

    def send_signal(self, sig: int) -> None:
        """To the command's own process alone; also what `terminate` and `kill` do."""
        inside = self.inside
        if inside is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if sig == signal.SIGCONT and state(self.pid) == "T":
                os.kill(self.pid, sig)  # which hands it on
                wait_until(lambda: state(inside) != "T")
                return
            os.kill(inside, sig)
            if sig == signal.SIGSTOP:  # what waits for it stops as well
                wait_until(lambda: state(self.pid) == "T" or self.poll() is not None)
            elif sig == signal.SIGKILL:  # and hears of its end when it goes on
                self.bury()

    def bury(self) -> None:
        """Once its own process has been killed: until what waits for it, and may be stopped, has heard of its end."""

        def hears() -> bool:
            super(HostCommand, self).send_signal(signal.SIGCONT)  # does nothing where it has ended
            return self.returncode is not None

        wait_until(hears)


class Host:
    """One host of a cluster: on, off, or dead."""

    def __init__(self, name: str, number: int, switch: Switch) -> None:
        self.name, self.ip = name, f"{SUBNET}.{FIRST_ADDRESS + number}"
        self.port = f"port{number}"  # at the switch
        self.mac = f"02:00:00:00:00:{number:02x}"  # the same after every boot: the others keep it in mind for a while
        self.log = switch.folder / f"sshd.{name}.log"  # what the host's first process, sshd, says
        self.pid = 0  # of the first process, as the machine counts; when it dies, so does the host
        self._switch = switch
        self._keeper: subprocess.Popen[str] | None = None
        self._namespace = ""
        self._commands: list[HostCommand] = []

    @property
    def is_on(self) -> bool:
        """Whether its first process lives."""
        return self._keeper is not None and self._keeper.poll() is None

    def boot(self) -> None:
        """Starts the first process, which waits until `plugged` says that there is a network."""
        namespaces = ["--net", "--uts", "--mount", "--pid", "--ipc"]
        with self.log.open("a") as log:
            self._keeper = subprocess.Popen(
                [*self._switch.sees_folder, "unshare", *namespaces, *KEEPER, "sh", "-c", HOST],
                env=os.environ | {"PATH": PATH, "NAME": self.name, "ADDRESS": self.ip},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_until_booted(self) -> None:
        """Until its namespaces are there, with all that is mounted in them."""
        assert self._keeper is not None and self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "ready\n", f"{self.name} does not start: {self.log.read_text()}"
        self._keeper.stdout.close()
        (self.pid,) = children(self._keeper.pid)
        self._namespace = pid_namespace(self.pid)

    def plugged(self) -> None:
        """Tells the host that its network is there."""
        assert self._keeper is not None and self._keeper.stdin is not None
        self._keeper.stdin.write("plugged\n")
        self._keeper.stdin.close()

    def die(self) -> None:
        """At once, with all its processes."""
        if self._keeper is None:
            return
        if self.is_on:
            os.kill(self.pid or self._keeper.pid, signal.SIGKILL)
        for command in self._commands:
            command.bury()
        self._keeper.wait(PATIENCE_S)
        self._keeper, self.pid, self._commands = None, 0, []

    def popen(self, command: Sequence[str | Path], *, cwd: str | Path | None = None, **options: Any) -> HostCommand:
        """Starts a command on the host. Of this process it has environment, directory and, unless told otherwise,
        output, but no input."""
        assert self.is_on, f"{self.name} is off"
        self._commands = [one for one in self._commands if one.poll() is None]
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--ipc"]
        words = [*UNTIL_WE_DIE, *enter, "env", f"--chdir={cwd or Path.cwd()}", *map(str, command)]
        started = HostCommand(words, **{"stdin": subprocess.DEVNULL, "text": True} | options)
        self._commands.append(started)
        return started

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 60.0,
        check: bool = False,
        input: str | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """A command to its end, as `subprocess.run` with the output captured."""
        if input is not None:
            options["stdin"] = subprocess.PIPE
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(command, **pipes | options) as process:
            said, complained = process.communicate(input, timeout)
        result = subprocess.CompletedProcess(list(map(str, command)), process.returncode, said, complained)
        assert not (check and result.returncode), f"on {self.name}: {result}"
        return result

    def pids(self) -> list[int]:
        """All processes of the host that live, as the machine counts; none when it is off."""
        return members(self._namespace) if self.is_on else []


class Cluster:
    """`n` hosts and `head`, which nothing but the tests knows of; up inside `with`.

    `off` are powered off from the start. `debian_hosts`: these (True: all) say in /etc/hosts, as Debian's installer
    does, that their own name is 127.0.1.1.
    """

    def __init__(
        self,
        n: int = 2,
        *,
        names: Sequence[str] | None = None,
        off: Collection[str] = (),
        debian_hosts: Collection[str] | bool = False,
    ) -> None:
        self.names = tuple(names or (f"node{number}" for number in range(1, n + 1)))  # all but `head`
        self.hosts: dict[str, Host] = {}
        self._off, self._debian_hosts = off, debian_hosts

    def __enter__(self) -> Self:
        self._switch = Switch()
        try:
            self.hosts = {name: Host(name, i, self._switch) for i, name in enumerate((*self.names, "head"))}
            for host in self.hosts.values():
                self.hosts_file(host.name).write_text(self._hosts_lines(host))
            self._start([host for host in self.hosts.values() if host.name not in self._off])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all hosts; when it returns, none of their processes is left."""
        for host in self.hosts.values():
            host.die()
        self._switch.close()

    def link(self, name: str, state: str) -> None:
        """Pulls a host's cable (`down`): no side hears of it. Or puts it back (`up`)."""
        self._switch.set_up(f"link set {self.hosts[name].port} {state}")

    def throttle(self, name: str, bytes_per_s: float) -> None:
        """Limits what a host sends; nothing is lost, and what does not fit waits in its queue."""
        limit = ["rate", f"{round(8 * bytes_per_s)}bit", "burst", f"{max(20_000, round(bytes_per_s / 100))}b"]
        shape = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit, "limit", "16mb"]
        self.hosts[name].run(shape, check=True)

    def kill_host(self, name: str) -> None:
        """All its processes die at once; the kernel that is left closes their connections."""
        self.hosts[name].die()

    def power_off(self, name: str) -> None:
        """The host is gone from one moment to the next: nobody is told."""
        self.link(name, "down")
        self.hosts[name].die()

    def start_host(self, name: str) -> None:
        """A host that is off boots: nothing of what ran on it is left, its private directories are gone."""
        host = self.hosts[name]
        assert not host.is_on, f"{name} is on"
        self._switch.set_up(
            f"link delete {self.hosts[name].port}", check=False
        )  # the kernel may still be at removing it
        self._start([host])

    def private_directory(self, name: str, path: str | Path) -> None:
        """From now on this host has files of its own there: its directory, empty at first, hides the shared one."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.hosts[name].run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)

    def hosts_file(self, name: str) -> Path:
        """The host's /etc/hosts; to be changed in place."""
        return self._switch.folder / f"hosts.{name}"

    def processes_with(self, variable: str, value: str | None = None) -> list[HostedProcess]:
        """The processes on all hosts whose environment has the variable (None: with any value)."""
        everyone = [(host.name, pid, environment(pid)) for host in self.hosts.values() for pid in host.pids()]
        return [
            HostedProcess(host, pid, command_line(pid))
            for host, pid, its in everyone
            if variable in its and value in (None, its[variable])
        ]

    def assert_no_orphans(self, variable: str, value: str | None = None, within_s: float = 0.0) -> None:
        """Fails where processes with the variable in their environment still live after `within_s`."""
        deadline = time.monotonic() + within_s
        while left := self.processes_with(variable, value):
            assert time.monotonic() < deadline, f"left after {within_s:g} s: {left}"
            time.sleep(0.02)

    def _hosts_lines(self, host: Host) -> str:
        is_debian = self._debian_hosts is True or (self._debian_hosts and host.name in self._debian_hosts)
        lines = [f"{other.ip} {other.name}" for other in self.hosts.values() if not (is_debian and other is host)]
        return "\n".join(["127.0.0.1 localhost", *([f"127.0.1.1 {host.name}"] if is_debian else []), *lines, ""])

    def _start(self, hosts: Sequence[Host]) -> None:
        """All at the same time; when it returns, the sshd of each is reached from `head`."""
        for host in hosts:
            host.boot()
        for host in hosts:
            host.wait_until_booted()
        cables = []
        for host in hosts:
            cables.append(f"link add {host.port} type veth peer name eth0 address {host.mac} netns {host.pid}")
            cables.append(f"link set {host.port} master switch up")
        self._switch.set_up(*cables)
        for host in hosts:
            host.plugged()
        reach = ["bash", "-c", REACHED, "reach", *(host.ip for host in hosts)]
        try:
            self.hosts["head"].run(reach, timeout=PATIENCE_S, check=True)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not reached: {[(host.name, host.log.read_text()) for host in hosts]}") from None
