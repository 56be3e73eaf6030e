"""The hosts of a run: a hostfile as `deepspeed` reads it, but strictly, and its --include and --exclude.

One host a line, `NAME slots=NUMBER`; `#` begins a comment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import LaunchError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LARGEST = 1024  # slots of one host; more is a slip of the finger


@dataclass(frozen=True)
class Host:
    """One machine and what a run may use of it."""

    name: str  # what ssh is given
    devices: tuple[int, ...]  # numbers of its GPUs, or just of its processes on a CPU

    @property
    def slots(self) -> int:
        """Ranks it runs."""
        return len(self.devices)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Its hosts in order. Raises LaunchError, with line and column, where it is not right."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise LaunchError(
            f"hostfile {path} does not exist: name one with lines such as `node1 slots=8`, or use `megalite train` "
            "for this machine alone"
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
    """What a filter in `deepspeed`'s words (`node1:0,1@node2`) leaves of them, in their order.

    Raises LaunchError where it leaves nothing, or names what is not there.
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
    """A hostfile of them; which devices of a host are used is said by `include_words`."""
    return "".join(f"{host.name} slots={max(host.devices) + 1}\n" for host in hosts)


def include_words(hosts: Sequence[Host]) -> str:
    """All of them with their devices, as --include takes it."""
    return "@".join(f"{host.name}:{','.join(map(str, host.devices))}" for host in hosts)


def _read_line(path: Path, number: int, line: str) -> Host | None:
    text = line.partition("#")[0].rstrip()
    words = [(match.group(), match.start()) for match in re.finditer(r"\S+", text)]
    if not words:
        return None
    (name, column), *rest = words
    if not NAME.fullmatch(name):
        user = " (a user name belongs in ~/.ssh/config)" if "@" in name else ""
        raise _mistake(path, number, column, f"{name!r} is not a host's name{user}")
    if not rest:
        raise _mistake(path, number, len(text), f"slots=NUMBER is missing after {name}")
    slots, column = rest[0]
    match = re.fullmatch(r"slots=([0-9]{1,6})", slots)
    if match is None:
        raise _mistake(path, number, column, f"{slots!r} is not slots=NUMBER")
    count = int(match.group(1))
    if not 1 <= count <= LARGEST:
        raise _mistake(path, number, column + len("slots="), f"{count} slots are not 1 to {LARGEST}")
    if len(rest) > 1:
        raise _mistake(path, number, rest[1][1], f"{rest[1][0]!r} does not belong here: a line is `NAME slots=NUMBER`")
    return Host(name, tuple(range(count)))


def _mistake(path: Path, line: int, column: int, what: str) -> LaunchError:
    return LaunchError(f"{path}:{line}:{column + 1}: {what}: correct the hostfile")


def _parse_filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """Host -> devices that the filter names; all where it names the host alone."""
    there = {host.name: host for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in there:
            raise LaunchError(
                f"{option} {text}: host {name!r} is not in the hostfile, which has {', '.join(there)}: correct it"
            )
        if name in named:
            raise LaunchError(f"{option} {text}: host {name} is named twice: put its slots together ({name}:0,1)")
        words = numbers.split(",") if colon else [str(device) for device in there[name].devices]
        wrong = [word for word in words if not word.isdecimal() or int(word) not in there[name].devices]
        if wrong:
            raise LaunchError(
                f"{option} {text}: host {name} has slots 0 to {there[name].slots - 1}, not {wrong[0]!r}: correct it"
            )
        named[name] = tuple(sorted({int(word) for word in words}))
    return named
