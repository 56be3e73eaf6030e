"""What a supervisor leaves for others to read between two attempts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.runtime.processes import StopSignals
from launch.supervision.supervisor import LOG, AttemptEnd, CommandSupervisor, Policy, Supervisor, announced_restart
from megalite.config import Config
from megalite.monitor.events import EVENTS
from tests.unit.launch.cli.test_mistakes import own_checkpoint


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


class SilentSupervisor(Supervisor):
    """Its attempts record nothing and exit with 0, as where a launcher's ranks were killed."""

    def _attempt(self, signals: StopSignals) -> AttemptEnd:
        return AttemptEnd(0)


def test_why_a_folder_is_unreadable_is_told_once(tmp_path: Path) -> None:
    """The supervisor goes by the exit code of the launcher then, which says little."""
    (tmp_path / EVENTS).write_text('{"event": "started", "step": "many"}\n')
    assert SilentSupervisor(Policy(1, 0.0, 0.0), tmp_path, None).run() == 1
    told = [line for line in (tmp_path / LOG).read_text().splitlines() if "ValueError: invalid literal for int" in line]
    assert len(told) == 1 and f"{tmp_path} is unreadable, so the command's exit code alone counts" in told[0]


@pytest.mark.parametrize(("tokens_seen", "code"), [(1000, 0), (872, 1)])
def test_a_run_of_tokens_is_done_by_those_that_its_checkpoint_has_seen(
    tiny: dict[str, Any], tmp_path: Path, tokens_seen: int, code: int
) -> None:
    """Two steps of a larger batch took them: at the config's own, of 4 x 32 tokens, 1000 tokens are 8 steps."""
    del tiny["training"]["steps"]
    tiny["training"]["tokens"] = 1000
    own_checkpoint(tokens_seen=tokens_seen)(tiny, tmp_path)
    config = Config.model_validate(tiny)
    assert SilentSupervisor(Policy(restarts=0), config.run_dir, config).run() == code
