"""A run that is asked to end finishes its step, saves, and ends with exit code 4; starting it again goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from launch.errors import PREEMPTED_CODE
from tests.conftest import write_config
from tests.e2e.audit import audit_against, complete, events, steps_done
from tests.e2e.commands import BIN, ROOT, run
from tests.e2e.conftest import References
from tests.e2e.faults import several, signal_in_step, slow_writer
from tests.e2e.warm_runs import session, train

pytestmark = pytest.mark.slow

GRACE_S = 20.0  # from the signal to the end of a tiny run; Slurm's default is 30 s
PREEMPTED = [PREEMPTED_CODE] * 2
BATCH = 4


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages that save at the end only."""
    tiny["training"]["steps"] = 16
    return tiny | {"parallel": {"pipeline_parallel_size": 2}, "monitor": {"plot": False}}


def test_signals_to_any_rank(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """One run, ended by one signal after the other in the third step of each of its sessions."""
    run_dir = Path(config["run_dir"])
    cases = [(signal.SIGTERM, [0, 1]), (signal.SIGTERM, [1]), (signal.SIGUSR1, [0, 1]), (signal.SIGUSR1, [0])]
    for number, (name, ranks) in enumerate(cases, start=1):
        with session(tmp_path / "session", config, fault=(signal_in_step, (3, name, ranks))) as running:
            running.wait_until(lambda done=3 * number - 1: steps_done(run_dir) >= done)  # type: ignore[misc]
            assert running.wait(GRACE_S) == PREEMPTED, running.output()
            last = f"signal {name.name}: the state of step {3 * number} is saved, start again to go on"
            assert running.output().count(f"megalite: preempted: {last}\n") == 1, running.output()
        assert steps_done(run_dir) == max(complete(run_dir / "checkpoints")) == 3 * number
        assert len(events(run_dir, "preempted")) == number
    train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, run_dir, BATCH)


def test_a_second_signal_ends_the_run_at_once(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """While it saves, which takes a minute here: what it has saved before stays whole."""
    run_dir = Path(config["run_dir"])
    with session(tmp_path / "session", config, fault=(signal_in_step, (3, signal.SIGTERM, [0]))) as running:
        assert running.wait(GRACE_S) == PREEMPTED
    slow = (several, ((slow_writer, (60.0,)), (signal_in_step, (2, signal.SIGTERM, [0, 1]))))
    with session(tmp_path / "session", config, fault=slow) as running:
        running.wait_until(lambda: (run_dir / "checkpoints" / ".step_00000005.tmp").exists())
        began = time.monotonic()
        running.send(signal.SIGTERM)
        assert running.wait(GRACE_S) == [-signal.SIGTERM] * 2, running.output()
        assert time.monotonic() - began < GRACE_S
    assert complete(run_dir / "checkpoints") == {3}
    train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, run_dir, BATCH)


def test_time_is_up(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    run_dir = Path(config["run_dir"])
    for step in (1, 2):  # each session takes a step, or none would ever get anywhere
        with session(tmp_path / "session", config, "training.max_minutes=0.001") as running:
            assert running.wait() == PREEMPTED, running.output()
            last = f"training.max_minutes (0.001) is over: the state of step {step} is saved, start again to go on"
            assert f"megalite: preempted: {last}\n" in running.output(0)
    train(tmp_path / "session", config, "training.max_minutes=60")
    audit_against(references.of(config).run_dir, run_dir, BATCH)


def test_the_command_passes_it_on(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """SIGTERM to `megalite train`, as a scheduler sends it."""
    config["training"]["steps"] = 100
    run_dir, path = Path(config["run_dir"]), write_config(tmp_path / "c.yaml", config)
    command = [str(BIN / "megalite"), "train", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment | {"DS_ACCELERATOR": "cpu"}, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while steps_done(run_dir) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=GRACE_S)
    assert process.returncode == PREEMPTED_CODE, said
    assert "megalite: preempted: signal SIGTERM" in said and "Traceback" not in said, said
    assert 3 <= steps_done(run_dir) < 100 and complete(run_dir / "checkpoints") == {steps_done(run_dir)}
    again = run(*command)
    assert again.returncode == 0, again.stderr
    audit_against(references.of(config).run_dir, run_dir, BATCH)
