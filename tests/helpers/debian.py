"""Debian's packages, for programs that tests use beside Python's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
APT_S = 240  # 20 where the network is good
NO_DAEMONS = Path("/usr/sbin/policy-rc.d")  # asked by Debian's packages whether they may start what they bring


def missing_programs(programs: Iterable[str]) -> list[str]:
    """Those of them that are not on this machine."""
    return [program for program in programs if shutil.which(program, path=PATH) is None]


def install_packages(packages: Iterable[str]) -> str | None:
    """By apt-get, without starting any daemon; one sentence on what went wrong, if anything did."""
    if os.geteuid() != 0:
        return "only root may install packages, and this is another user"
    if missing_programs(["apt-get"]):
        return "there is no apt-get"
    packages = sorted({*packages})
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
