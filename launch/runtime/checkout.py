"""Tells which commit of this repository runs, where it runs from a checkout."""

from __future__ import annotations

import subprocess
from typing import Any

from launch.runtime.started_modules import INSTALLATION


def git_state() -> dict[str, Any] | None:
    """Returns the commit of this checkout and whether it has changes; None if it is no git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(INSTALLATION), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    if not (INSTALLATION / ".git").exists():  # an environment inside another project's checkout is no commit of ours
        return None
    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
