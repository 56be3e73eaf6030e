"""What the hosts of a cluster are plugged into, and their settings: all of it out of the machine's sight.

In: nothing. Out: a `Switch`: a process whose network is a bridge, and whose /run holds files that only namespaces see.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.helpers.cluster_machine import PATH
from tests.helpers.process_table import PATIENCE_S

UNTIL_WE_DIE = ("setpriv", "--pdeathsig", "KILL")  # a test run that is killed takes its hosts along
SWITCH = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
ip link add switch type bridge
ip link set switch up
echo ready
exec sleep infinity
"""


class Switch:
    """Ready when it has been made."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*UNTIL_WE_DIE, "unshare", "--net", "--mount", "sh", "-c", SWITCH],
            env=os.environ | {"PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "there is no switch"
        self._process.stdout.close()
        self.folder = Path(f"/proc/{self._process.pid}/root/run")  # its /run, seen from here
        self.sees_folder = (*UNTIL_WE_DIE, "nsenter", "--target", str(self._process.pid), "--mount")
        (self.folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")  # sshd turns away where root is locked
        _write_ssh(self.folder / "ssh")

    def set_up(self, *commands: str, check: bool = True) -> None:
        """Commands of `ip`, in the switch's network."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._process.pid), "--net", "ip", "-batch", "-"],
            env=os.environ | {"PATH": PATH},
            input="".join(f"{command}\n" for command in commands),
            capture_output=True,
            text=True,
        )
        assert not (check and done.returncode), done.stderr

    def close(self) -> None:
        """Nothing of it is left."""
        self._process.kill()
        self._process.wait(PATIENCE_S)


def _write_ssh(folder: Path) -> None:
    """/etc/ssh of all hosts: one key, which is the hosts' own, root's, and the only one that is let in."""
    folder.mkdir()
    key = folder / "ssh_host_ed25519_key"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True, stdin=subprocess.DEVNULL
    )
    public = key.with_suffix(".pub").read_text()
    (folder / "authorized_keys").write_text(public)
    (folder / "ssh_known_hosts").write_text(f"* {public}")
    (folder / "ssh_config").write_text(f"Host *\n  IdentityFile /etc/ssh/{key.name}\n  IdentitiesOnly yes\n")
    settings = {
        "HostKey": f"/etc/ssh/{key.name}",
        "AuthorizedKeysFile": "/etc/ssh/authorized_keys",
        "PermitRootLogin": "yes",
        "UsePAM": "no",
        "PidFile": "none",
        "MaxStartups": "200",
        "MaxSessions": "200",
    }
    (folder / "sshd_config").write_text("".join(f"{option} {value}\n" for option, value in settings.items()))
