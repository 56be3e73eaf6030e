"""What this machine lacks to make hosts of namespaces, and `make cluster-packages`, which installs it.

In: nothing but the machine. Out: `why_no_hosts`, one sentence or None; as a program, Debian's packages.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
HOSTS = ("unshare", "nsenter", "setpriv", "mount", "ip", "hostname", "sshd", "ssh", "ssh-keygen", "pdsh", "pkill")
PACKAGE_OF = {  # in Debian and Ubuntu
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "hostname": "hostname",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",
    "pkill": "procps",
    "mpirun.openmpi": "openmpi-bin",
    "mpirun.mpich": "mpich",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}
FURTHER = ("slurm-wlm-basic-plugins",)  # packages without a program
APT_S = 240  # 20 where the network is good
PROBE = "mount -t tmpfs tmpfs /run && hostname probe"
SWITCH_PROBE = (
    "ip link add switch type bridge && ip link add port1 type veth peer name eth0 && ip link set port1 master switch"
)
NO_DAEMONS = Path("/usr/sbin/policy-rc.d")  # asked by Debian's packages whether they may start what they bring


def why_no_hosts(*programs: str) -> str | None:
    """Why this machine cannot make hosts whose tests need `programs` as well; None where it can."""
    reason = why_no_namespaces()
    if reason is None:
        missing = missing_programs((*HOSTS, *programs))
        reason = f"{', '.join(missing)} not installed" if missing else None
    return reason and f"NO HOSTS HERE: {reason}. `make test-cluster` as root on Debian installs what is missing"


def missing_programs(programs: Iterable[str]) -> list[str]:
    """Those of them that are not on this machine."""
    return [program for program in programs if shutil.which(program, path=PATH) is None]


@functools.cache
def why_no_namespaces() -> str | None:
    """Why the kernel does not let this process make namespaces, by trying; None where it does."""
    if sys.platform != "linux":
        return f"namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "only root may make them, and this is another user"
    if missing := missing_programs(["unshare", "mount", "hostname"]):
        return f"{', '.join(missing)} not installed"
    probe = PROBE if missing_programs(["ip"]) else f"{PROBE} && {SWITCH_PROBE}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "sh", "-c", probe],
        env=os.environ | {"PATH": PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return f"no namespaces may be made ({tried.stderr.strip()})" if tried.returncode else None


def install() -> str | None:
    """Installs what is missing where Debian's tools can; one sentence on what was not done."""
    missing = missing_programs(PACKAGE_OF)
    if not missing:
        return None
    reason = why_no_namespaces()
    if reason is None and missing_programs(["apt-get"]):
        reason = "there is no apt-get"
    if reason is not None:
        return f"packages for tests/cluster are not installed: {reason}"
    packages = sorted({*(PACKAGE_OF[program] for program in missing), *FURTHER})
    print(f"installing {' '.join(packages)}", flush=True)
    is_ours = not NO_DAEMONS.exists()
    if is_ours:
        NO_DAEMONS.write_text("#!/bin/sh\nexit 101\n")
        NO_DAEMONS.chmod(0o755)
    try:
        return _apt("update") or _apt("install", "-y", "--no-install-recommends", *packages)
    finally:
        if is_ours:
            NO_DAEMONS.unlink()


def _apt(*words: str) -> str | None:
    """What went wrong, if anything did."""
    command = ["apt-get", "-q", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=60", *words]
    done = subprocess.run(
        ["timeout", str(APT_S), *command],
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return None
    return f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-500:]}"


if __name__ == "__main__":
    if said := install():
        print(f"{said}: tests that need them are skipped", file=sys.stderr)
