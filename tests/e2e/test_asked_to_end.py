"""A run that is asked to end finishes its step, saves, and ends with exit code 75; starting it again goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.errors import PREEMPTED_CODE
from launch.inspection.state import RunState
from launch.inspection.status import read_status
from tests.conftest import write_config
from tests.e2e.conftest import References
from tests.helpers.audit import audit_against, complete, events, steps_done
from tests.helpers.commands import BIN, ROOT
from tests.helpers.faults import several, signal_in_step, slow_writer
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

GRACE_S = 20.0  # from the signal to the end of a tiny run; Slurm's default is 30 s
PREEMPTED = [PREEMPTED_CODE] * 2
BATCH = 4


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages that save at the end only."""
    tiny["training"]["steps"] = 16
    return tiny | {"parallel": {"pipeline_parallel_size": 2}, "monitor": {"plot": False}}


def has_come_to(run_dir: Path, step: int) -> bool:
    return steps_done(run_dir) >= step


def test_signals_to_any_rank(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """One run, ended by one signal after the other in the third step of each of its sessions."""
    run_dir = Path(config["run_dir"])
    cases = [(signal.SIGTERM, [0, 1]), (signal.SIGTERM, [1]), (signal.SIGUSR1, [0, 1]), (signal.SIGUSR1, [0])]
    for number, (name, ranks) in enumerate(cases, start=1):
        with session(tmp_path / "session", config, fault=(signal_in_step, (3, name, ranks))) as running:
            running.wait_until(partial(has_come_to, run_dir, 3 * number - 1))
            assert running.wait(GRACE_S) == PREEMPTED, running.output()
            last = f"signal {name.name}: the state of step {3 * number} is saved, start again to go on"
            assert running.output().count(f"megalite: warning: preempted: {last}\n") == 1, running.output()
        assert steps_done(run_dir) == max(complete(run_dir / "checkpoints")) == 3 * number
        assert len(events(run_dir, "preempted")) == number
    train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, run_dir, BATCH)


def test_more_signals_change_nothing(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """Launchers repeat them, and some send another kind, while the ranks still save: that takes two seconds here."""
    run_dir = Path(config["run_dir"])
    fault = (several, ((slow_writer, (2.0,)), (signal_in_step, (3, signal.SIGUSR1, [0, 1]))))
    with session(tmp_path / "session", config, fault=fault) as running:
        running.wait_until(lambda: (run_dir / "checkpoints" / ".step_00000003.tmp").exists())
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            running.send(number)
            time.sleep(0.1)
        assert running.wait(GRACE_S) == PREEMPTED, running.output()
    assert complete(run_dir / "checkpoints") == {3}
    train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, run_dir, BATCH)


def test_time_is_up(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    run_dir = Path(config["run_dir"])
    """And the time until it is started again is nobody's loss."""
    for step in (1, 2):  # each session takes a step, or none would ever get anywhere
        with session(tmp_path / "session", config, "training.max_minutes=0.001") as running:
            assert running.wait() == PREEMPTED, running.output()
            last = f"training.max_minutes (0.001) is over: the state of step {step} is saved, start again to go on"
            assert f"megalite: warning: preempted: {last}\n" in running.output(0)
        assert read_status(run_dir).state is RunState.PREEMPTED
        time.sleep(1.0)
    train(tmp_path / "session", config, "training.max_minutes=60")
    audit_against(references.of(config).run_dir, run_dir, BATCH)
    goodput = json.loads((run_dir / "receipt.json").read_text())["goodput"]
    assert goodput["sessions"] == 3 and goodput["seconds"]["down"] == 0 and goodput["paused_s"] >= 2
    status = read_status(run_dir)
    assert (status.state, status.step, status.steps_at_risk) == (RunState.ENDED, 16, 0)


def test_the_command_passes_it_on(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """SIGTERM to `megalite train`, as a scheduler sends it."""
    config["training"]["steps"] = 60
    run_dir, path = Path(config["run_dir"]), write_config(tmp_path / "c.yaml", config)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [str(BIN / "megalite"), "train", str(path)],
        cwd=ROOT,
        env=environment | {"DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while steps_done(run_dir) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == PREEMPTED_CODE, said
    assert "megalite: warning: preempted: signal SIGTERM" in said and "Traceback" not in said, said
    assert 3 <= steps_done(run_dir) < 60 and complete(run_dir / "checkpoints") == {steps_done(run_dir)}
    train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, run_dir, BATCH)
