"""Collects facts about one host and probes its connections to others, for `megalite doctor`.

The source is sent through ssh and executed there before the agent: standard library only, Python 3.8 or newer, no
import of ours. Input: the arguments of an action. Output: values that JSON can hold. Whatever may hang, such as a name
server or a network file system, has a time limit; a fact that is missing is None or empty, never an exception.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import ipaddress
import os
import platform
import random
import resource
import site
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

ROOMS = ("megalite", "models", "data_pipeline", "launch")
PATIENCE_S = 2.0  # for a name server or a file system; training would hang in it as well
LISTEN_S = 60.0
# below what Linux gives to outgoing connections (net.ipv4.ip_local_port_range) and Kubernetes to services
QUIET_PORTS = range(15_000, 30_000)
MAX_CONNECTING = 64  # connections attempted at the same time
GET_ADDRESS = 0x8915  # SIOCGIFADDR, linux/sockios.h
FOLDER = -1  # in place of a size
_listening: list[socket.socket] = []


def facts(
    root: str,
    packages: list[str],
    python_path: list[str],
    folders: list[str],
    files: list[str],
    caches: list[str],
    extensions: list[str],
) -> dict[str, Any]:
    """Returns all facts that are asked for once.

    `root` is the folder of our code, `python_path` precedes Python's own folders in the search for `packages`. Free
    space is reported for `folders`, sizes for `files`, and compile locks for the `extensions` of torch that ranks
    build, in torch's folder for them and in `caches`.
    """
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "kernel": platform.release(),
        "uid": os.geteuid(),
        "umask": umask(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": host_memory_bytes(),
        "has_bf16_units": has_bf16_units(),
        "versions": {name: version_of(name, python_path) for name in packages},
        "code": within(PATIENCE_S * 4, lambda: code_digest(file_digests(root)), None),
        "own_name": own_name(),
        "interfaces": interfaces(),
        "ssh_address": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2] or None,
        "infiniband": names_in("/sys/class/infiniband"),
        "limits": {
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "memlock": None if memlock == resource.RLIM_INFINITY else memlock,  # bytes that a process may pin
        },
        "folders": {path: within(PATIENCE_S, partial(space, path), None) for path in folders},
        "files": {path: within(PATIENCE_S, partial(size_of, path), None) for path in files},
        "locks": within(PATIENCE_S * 2, lambda: compile_locks(caches, extensions), []),
    }


def umask() -> int:
    """Returns this process's umask; os.umask would have to change it, while other threads make files."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def within(seconds: float, work: Callable[[], Any], otherwise: Any) -> Any:
    """Returns the result of `work`, or `otherwise` if it takes longer than `seconds` or raises OSError."""
    result: list[Any] = []

    def do() -> None:
        with contextlib.suppress(OSError):
            result.append(work())

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else otherwise


def version_of(package: str, python_path: list[str]) -> str | None:
    """Returns the version of a package without importing it; None if it is not installed."""
    own = [site.getusersitepackages()] if sys.prefix == sys.base_prefix else []
    for found in importlib.metadata.distributions(name=package, path=[*python_path, *own, *sys.path]):
        return found.version
    return None


def file_digests(root: str) -> dict[str, str]:
    """Maps each of our source files, by its path below `root`, to a digest; empty if there are none."""
    files = sorted(file for room in ROOMS for file in Path(root, room).rglob("*.py"))
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


def code_digest(digests: dict[str, str]) -> str:
    """Combines file digests into one; "" if there are none."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:12] if digests else ""


def host_memory_bytes() -> int:
    """Returns the memory that processes of this host may use together: all of it, or less where a cgroup limits it.

    Swap space does not count: a run that needs it makes no progress.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def cgroup_limits(memberships: Path, root: Path) -> Iterator[int]:
    """Yields the memory limits of this process's cgroup and those above it, of versions 1 and 2, in bytes."""
    with contextlib.suppress(OSError):
        for line in memberships.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
            own = PurePosixPath(path.lstrip("/"))
            for folder in dict.fromkeys((own, *own.parents)):
                # in a container the path may be one that is seen from outside alone
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    yield int((top / folder / name).read_text())


def has_bf16_units() -> bool:
    """Returns whether this CPU multiplies bf16 without converting it to fp32."""
    flags = cpu_info("flags") or cpu_info("Features")  # x86; ARM
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())


def cpu_info(key: str) -> str:
    """Returns a field of the first CPU in /proc/cpuinfo; empty if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""


def own_name() -> dict[str, Any]:
    """Returns the addresses that the host's own name resolves to, and which are loopback or belong to another host."""

    def look_up() -> list[str]:
        try:
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return []
        return list(dict.fromkeys(str(one[4][0]) for one in found))

    addresses = within(PATIENCE_S, look_up, [])
    return {
        "addresses": addresses,
        "loopback": [one for one in addresses if ipaddress.ip_address(one.partition("%")[0]).is_loopback],
        "foreign": [one for one in addresses if not is_own(one)],
    }


def is_own(address: str) -> bool:
    """Returns whether a socket of this host can bind to `address`."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def interfaces() -> dict[str, str]:
    """Returns the IPv4 address of each network interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def names_in(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in Path(folder).iterdir())
    return []


def space(path: str) -> dict[str, int] | None:
    """Returns the free bytes and inodes of the file system that holds `path`, or will hold it."""
    for place in (Path(path), *Path(path).parents):
        with contextlib.suppress(OSError):
            state = os.statvfs(place)
            is_counted = state.f_files > 0  # some file systems have no fixed number of inodes
            return {"bytes": state.f_bavail * state.f_frsize, "files": state.f_favail if is_counted else 1 << 40}
    return None


def size_of(path: str) -> int | None:
    """Returns the size of a file in bytes, FOLDER for a folder, None if there is neither."""
    with contextlib.suppress(OSError):
        return FOLDER if Path(path).is_dir() else Path(path).stat().st_size
    return None


def compile_locks(caches: list[str], extensions: list[str]) -> list[dict[str, Any]]:
    """Returns the locks of torch's extension builder for `extensions`: age, the process of this host that holds it, and
    whether it is a file that this user has there.

    Every process that finds a lock without a holder waits for ever (torch/utils/file_baton.py); ranks do not look for
    those of extensions that only other programs build.
    """
    # unlike Path.expanduser it raises nothing where there is no home
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    own = os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path(cache, "torch_extensions"))
    folders = [Path(folder) for folder in dict.fromkeys([*caches, own])]
    patterns = [f"{above}{name}/lock" for name in extensions for above in ("", "*/")]
    locks = [lock for folder in folders for pattern in patterns for lock in folder.glob(pattern)]
    found = {Path(lock.parent.resolve(), lock.name): lock.lstat() for lock in locks if not lock.is_dir()}
    roots = {root.resolve() for root in folders}
    holders = holders_of({str(path) for path in found})
    return [
        {
            "path": str(path),
            "age_s": time.time() - state.st_mtime,
            "holder": holders.get(str(path)),
            # a link, of the lock or of a folder above, may lead to a lock of another program
            "is_own": is_own_file(state) and not roots.isdisjoint(path.parents),
        }
        for path, state in sorted(found.items())
    ]


def is_own_file(state: os.stat_result) -> bool:
    """Returns whether it is a regular file of the user of this process."""
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()


def remove_lock(path: str) -> dict[str, bool]:
    """Removes a compile lock, but no link and no other user's file; returns whether it is gone."""
    lock = Path(path)
    with contextlib.suppress(OSError):
        folder = os.open(str(lock.parent), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if is_own_file(os.stat(lock.name, dir_fd=folder, follow_symlinks=False)):
                os.unlink(lock.name, dir_fd=folder)
                return {"removed": True}
        finally:
            os.close(folder)
    return {"removed": False}


def holders_of(paths: set[str]) -> dict[str, int]:
    """Maps paths to the processes that have them open."""
    found = {}
    for process in Path("/proc").iterdir() if paths else ():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                for opened in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        name = os.readlink(opened)  # noqa: PTH115 - Path.readlink is not in 3.8
                        if name in paths:
                            found[name] = int(process.name)
    return found


def clock() -> dict[str, float]:
    """Returns the time of this host in seconds since 1970."""
    return {"time": time.time()}


def free_port() -> dict[str, int]:
    """Returns a TCP port that is free at the moment, if possible one that the kernel gives to no outgoing connection.

    Ranks that start on this host make many connections, any of which could take the port before rank 0 listens on it.
    """
    for port in random.SystemRandom().sample(QUIET_PORTS, 50):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return {"port": port}
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"port": int(probe.getsockname()[1])}


def listen(greeting: str) -> dict[str, int]:
    """Accepts connections on all addresses and sends `greeting`, until `stop_listening` or for LISTEN_S."""
    try:
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        server = socket.create_server(("", 0))
    server.listen(1024)
    _listening.append(server)
    deadline = time.monotonic() + LISTEN_S

    def greet() -> None:
        with server, contextlib.suppress(OSError):  # `stop_listening` has closed the socket
            while time.monotonic() < deadline:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                client, _ = server.accept()
                with client, contextlib.suppress(OSError):
                    client.settimeout(PATIENCE_S)
                    client.sendall(greeting.encode() + b"\n")

    threading.Thread(target=greet, daemon=True).start()
    return {"port": int(server.getsockname()[1])}


def stop_listening() -> dict[str, Any]:
    """Closes all ports that `listen` has opened."""
    while _listening:
        with contextlib.suppress(OSError):
            _listening.pop().shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
    return {}


def connect(targets: dict[str, dict[str, Any]], patience_s: float) -> dict[str, Any]:
    """Connects to `targets` (name -> addresses, port, greeting).

    Returns, for each name, the first address that works and the source address used, or why none does.
    """

    def reach(name: str) -> tuple[str, dict[str, Any]]:
        target = targets[name]
        problems = []
        for address in target["addresses"]:
            began = time.monotonic()
            try:
                with socket.create_connection((address, target["port"]), patience_s) as connection:
                    took_s = time.monotonic() - began
                    connection.settimeout(patience_s)
                    if connection.recv(256).decode(errors="replace").strip() == target["greeting"]:
                        return name, {"address": address, "source": connection.getsockname()[0], "seconds": took_s}
                    problems.append(f"{address}: somebody else answers")
            except OSError as error:
                problems.append(
                    f"{address}: {'no answer' if isinstance(error, socket.timeout) else error.strerror or error}"
                )
        return name, {"problem": "; ".join(problems)}

    with ThreadPoolExecutor(MAX_CONNECTING) as pool:
        return dict(pool.map(reach, targets))


def write_token(folder: str, name: str, text: str) -> dict[str, Any]:
    """Writes a file for others to read. Returns the folders created for it, and the problem if writing failed."""

    def write() -> dict[str, Any]:
        made: list[str] = []
        try:
            for place in [*reversed(Path(folder).parents), Path(folder)]:
                if not place.is_dir():
                    with contextlib.suppress(FileExistsError):  # another host has just created it
                        place.mkdir()
                        made.append(str(place))
            with Path(folder, name).open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return {"made": made, "problem": error.strerror or str(error)}
        return {"made": made, "problem": None}

    return within(PATIENCE_S * 2, write, {"made": [], "problem": "it does not answer"})


def read_tokens(folder: str, texts: dict[str, str], wait_s: float) -> dict[str, Any]:
    """Returns the names of the files with the expected text; waits up to `wait_s` for a slow network file system."""
    deadline = time.monotonic() + wait_s

    def look() -> list[str]:
        found = []
        for name, text in texts.items():
            with contextlib.suppress(OSError):
                if Path(folder, name).read_text() == text:
                    found.append(name)
        return found

    while True:
        found = within(PATIENCE_S, look, [])
        if len(found) == len(texts) or time.monotonic() > deadline:
            return {"found": found}
        time.sleep(0.1)
        within(PATIENCE_S, lambda: names_in(folder), [])  # makes NFS ask its server again


def remove_token(folder: str, name: str, made: list[str]) -> dict[str, Any]:
    """Removes a token and the folders `made` for it. These may still hold tokens of other hosts for a moment."""
    with contextlib.suppress(OSError):
        Path(folder, name).unlink()
    deadline = time.monotonic() + 0.5
    for place in reversed(made):
        while Path(place).is_dir() and time.monotonic() < deadline:
            try:
                Path(place).rmdir()
            except OSError:
                time.sleep(0.01)
    return {}


def run_program(command: list[str], environment: dict[str, str], folder: str, limit_s: float) -> dict[str, Any]:
    """Runs a program for at most `limit_s`; returns its exit code and the end of its output.

    PARENT_PROCESS is set for it, so that it can end when this process does.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment, "PARENT_PROCESS": str(os.getpid())},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return {"code": process.returncode, "said": output[-20000:].decode(errors="replace")}


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    action.__name__: action
    for action in (
        *(facts, file_digests, clock, free_port, run_program),
        *(listen, stop_listening, connect, write_token, read_tokens, remove_token, remove_lock),
    )
}
