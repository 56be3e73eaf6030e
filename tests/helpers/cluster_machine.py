"""What this machine lacks to make hosts of namespaces, and what of it `make test-packages` installs.

In: nothing but the machine. Out: `why_no_hosts`, one sentence or None; as a program, Debian's packages.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from tests.helpers.debian import PATH, install_packages, missing_programs

HOSTS = ("unshare", "nsenter", "setpriv", "mount", "ip", "tc", "hostname", "sshd", "ssh", "ssh-keygen", "pdsh", "pkill")
PACKAGE_OF = {  # in Debian and Ubuntu
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "tc": "iproute2",
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
PROBE = "mount -t tmpfs tmpfs /run && hostname probe"
SWITCH_PROBE = (
    "ip link add switch type bridge && ip link add port1 type veth peer name eth0 && ip link set port1 master switch"
)


def why_no_hosts(*programs: str) -> str | None:
    """Why this machine cannot make hosts whose tests need `programs` as well; None where it can."""
    reason = why_no_namespaces()
    if reason is None:
        missing = missing_programs((*HOSTS, *programs))
        reason = f"{', '.join(missing)} not installed" if missing else None
    return reason and f"NO HOSTS HERE: {reason}. `make test-cluster` as root on Debian installs what is missing"


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
    if reason := why_no_namespaces():
        return f"packages for tests/cluster are not installed: {reason}"
    return install_packages([*(PACKAGE_OF[program] for program in missing), *FURTHER])


if __name__ == "__main__":
    if said := install():
        print(f"{said}: tests that need them are skipped", file=sys.stderr)
