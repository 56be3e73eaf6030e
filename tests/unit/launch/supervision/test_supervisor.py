"""What a supervisor leaves for others to read between two attempts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from launch.supervision.supervisor import LOG, CommandSupervisor, Policy, announced_restart


def test_a_restart_is_announced_until_it_is_overdue(tmp_path: Path) -> None:
    """The supervisor's own sentence, so that a change of it is noticed here."""
    assert announced_restart(tmp_path) == ""
    supervisor = CommandSupervisor([sys.executable, "-c", "exit(1)"], Policy(1, 0.0, 0.0), tmp_path, None)
    assert supervisor.run() == 1
    announced, given_up = (tmp_path / LOG).read_text().splitlines()
    assert announced_restart(tmp_path) == "" and "gave up" in given_up
    (tmp_path / LOG).write_text(f"{announced}\n")
    assert announced_restart(tmp_path).startswith("restart 1 of 1 in 0 s: ")
    for cut in ("", "x", announced[:30]):
        (tmp_path / LOG).write_text(cut)
        assert announced_restart(tmp_path) == ""
    long_ago = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 1000))
    (tmp_path / LOG).write_text(f"{long_ago} restart 3 of 5 in 8 s: exit code 1 after step 3\n")
    assert announced_restart(tmp_path) == ""
    (tmp_path / LOG).write_text(f"{long_ago} restart 3 of 5 in 1.2e+03 s: exit code 1 after step 3\n")
    assert announced_restart(tmp_path).startswith("restart 3 of 5")
