"""Hosts of a run, from a hostfile and the --include and --exclude filters of `deepspeed`, but parsed strictly.

A hostfile has one host per line, `NAME slots=NUMBER`; `#` begins a comment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.path_suggestions import did_you_mean
from launch.errors import LaunchError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HOSTS_OF_MPI = re.compile(rf"{NAME.pattern}:[0-9]{{1,6}}")  # as in `horovodrun -H a:2,b:2`
LARGEST = 1024  # slots of one host; more is a typing error


@dataclass(frozen=True)
class Host:
    """One machine and the devices that a run may use on it."""

    name: str  # as passed to ssh
    devices: tuple[int, ...]  # indices of its GPUs, or of its processes on a CPU

    @property
    def slots(self) -> int:
        """The number of ranks it runs."""
        return len(self.devices)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Returns the hosts of a file in order. Raises LaunchError with line and column if it is malformed."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        if all(HOSTS_OF_MPI.fullmatch(host) for host in str(path).split(",")):
            wanted = " and ".join(f"`{host.replace(':', ' slots=')}`" for host in str(path).split(","))
            raise LaunchError(f"--hostfile takes a file, not hosts: write {wanted} into one, a line each") from None
        raise LaunchError(
            f"hostfile {path} does not exist{did_you_mean(path)}: name one with lines such as `node1 slots=8`, or use "
            "`megalite train` for this machine alone"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"hostfile {path} cannot be read: {reason}") from None
    hosts: dict[str, tuple[Host, int]] = {}
    for number, line in enumerate(lines, 1):
        host = _read_line(path, number, line)
        if host is None:
            continue
        if host.name in hosts:
            raise _mistake(
                path, number, line.index(host.name), f"host {host.name} is already in line {hosts[host.name][1]}"
            )
        hosts[host.name] = host, number
    if not hosts:
        raise LaunchError(f"hostfile {path} names no host: add lines such as `node1 slots=8`")
    return tuple(host for host, _ in hosts.values())


def select_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Applies a filter in `deepspeed`'s syntax (`node1:0,1@node2`) and keeps the order of the hosts.

    Raises LaunchError if no host is left, or if the filter names a host or slot that does not exist.
    """
    if include is not None and exclude is not None:
        raise LaunchError("--include and --exclude cannot be given together: keep one of them")
    if include is not None:
        named = _parse_filter("--include", include, hosts)
        left = [replace(host, devices=named[host.name]) for host in hosts if host.name in named]
    elif exclude is not None:
        named = _parse_filter("--exclude", exclude, hosts)
        left = [
            replace(host, devices=tuple(device for device in host.devices if device not in named.get(host.name, ())))
            for host in hosts
        ]
        left = [host for host in left if host.devices]
    else:
        left = list(hosts)
    if not left:
        raise LaunchError(f"--exclude {exclude} leaves no host: exclude less")
    return tuple(left)


def hostfile_text(hosts: Sequence[Host]) -> str:
    """Returns the text of a hostfile; `include_filter` says which devices of each host are used."""
    return "".join(f"{host.name} slots={max(host.devices) + 1}\n" for host in hosts)


def include_filter(hosts: Sequence[Host]) -> str:
    """Returns the --include filter that selects the devices of these hosts."""
    return "@".join(f"{host.name}:{','.join(map(str, host.devices))}" for host in hosts)


def _read_line(path: Path, number: int, line: str) -> Host | None:
    text = line.partition("#")[0].rstrip()
    fields = [(match.group(), match.start()) for match in re.finditer(r"\S+", text)]
    if not fields:
        return None
    (name, column), *rest = fields
    if not NAME.fullmatch(name):
        remedy = "a user name belongs in ~/.ssh/config" if "@" in name else ""
        if as_mpi := re.fullmatch(rf"({NAME.pattern}):([0-9]{{1,6}})", name):  # MPICH's form, and Horovod's
            remedy = f"write `{as_mpi[1]} slots={as_mpi[2]}`"
        remedy = remedy or "write one host a line by its name or IPv4 address, as in `node1 slots=8`"
        raise _mistake(path, number, column, f"{name!r} is not a host's name ({remedy})")
    if not rest:
        raise _mistake(path, number, len(text), f"slots=NUMBER is missing after {name}, as in `{name} slots=8`")
    slots, column = rest[0]
    match = re.fullmatch(r"slots=([0-9]{1,6})", slots)
    if match is None:
        meant = re.fullmatch(r"(?:[A-Za-z_-]+=)?([0-9]{1,6})", slots)
        raise _mistake(
            path, number, column, f"{slots!r} is not slots=NUMBER, as in `{name} slots={meant[1] if meant else 8}`"
        )
    count = int(match.group(1))
    if not 1 <= count <= LARGEST:
        raise _mistake(path, number, column + len("slots="), f"{count} slots are not 1 to {LARGEST}")
    if len(rest) > 1:
        raise _mistake(path, number, rest[1][1], f"{rest[1][0]!r} does not belong here: write `{name} {slots}` alone")
    return Host(name, tuple(range(count)))


def _mistake(path: Path, line: int, column: int, what: str) -> LaunchError:
    return LaunchError(f"{path}:{line}:{column + 1}: {what}: correct the hostfile")


def _parse_filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """Maps each host in the filter to the devices it names, or to all if it names none."""
    known = {host.name: host for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in known:
            raise LaunchError(
                f"{option} {text}: host {name!r} is not in the hostfile, which has {', '.join(known)}: correct it"
            )
        if name in named:
            raise LaunchError(f"{option} {text}: host {name} is named twice: put its slots together ({name}:0,1)")
        slots = numbers.split(",") if colon else [str(device) for device in known[name].devices]
        devices = known[name].devices
        wrong = [slot for slot in slots if not re.fullmatch(r"[0-9]{1,6}", slot) or int(slot) not in devices]
        if wrong:
            raise LaunchError(
                f"{option} {text}: host {name} has slots 0 to {known[name].slots - 1}, not {wrong[0]!r}: correct it"
            )
        named[name] = tuple(sorted({int(slot) for slot in slots}))
    return named
