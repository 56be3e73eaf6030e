"""A run that is asked to end finishes its step, saves, and ends with 75, after Ctrl-C 130; starting it again goes on.

Before its first step there is nothing to save, and it ends within seconds, also where its ranks wait for others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.errors import INTERRUPTED_CODE, PREEMPTED_CODE
from launch.inspection.state import RunState
from launch.inspection.status import read_status
from launch.runtime.local_ranks import free_port
from megalite.resilience.signals import INTERRUPT_REPEAT_S, exit_code_for
from tests.conftest import write_config
from tests.e2e.conftest import References
from tests.helpers.audit import audit_against, complete, events, steps_done
from tests.helpers.commands import BIN, ROOT
from tests.helpers.faults import endless_export, several, signal_in_step, slow_writer
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

GRACE_S = 20.0  # from the signal to the end of a tiny run; Slurm's default is 30 s
PREEMPTED = [PREEMPTED_CODE] * 2
BATCH = 4


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages that save at the end only."""
    tiny["training"]["steps"] = 16
    return tiny | {"parallel": {"pipeline_parallel_size": 2}, "monitor": {"plot": False, "report": False}}


def has_come_to(run_dir: Path, step: int) -> bool:
    return steps_done(run_dir) >= step


def test_signals_to_any_rank(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """One run, ended by one signal after the other in the third step of each of its sessions."""
    run_dir = Path(config["run_dir"])
    cases = [(signal.SIGTERM, [0, 1]), (signal.SIGTERM, [1]), (signal.SIGUSR1, [0, 1]), (signal.SIGINT, [0])]
    for number, (name, ranks) in enumerate(cases, start=1):
        with session(tmp_path / "session", config, fault=(signal_in_step, (3, name, ranks))) as running:
            running.wait_until(partial(has_come_to, run_dir, 3 * number - 1))
            assert running.wait(GRACE_S) == [exit_code_for(name)] * 2, running.output()
            ending = "interrupted" if name == signal.SIGINT else "preempted"
            last = f"{ending}: signal {name.name}: the state of step {3 * number} is saved, start again to go on"
            assert running.output().count(f"megalite: warning: {last}\n") == 1, running.output()
            assert running.output().count("stopping after this step; ") == int(name != signal.SIGUSR1 and 0 in ranks)
        assert steps_done(run_dir) == max(complete(run_dir / "checkpoints")) == 3 * number
        assert len(events(run_dir, ending)) == (1 if name == signal.SIGINT else number)
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


def test_a_second_ctrl_c_ends_it_at_once(config: dict[str, Any], tmp_path: Path) -> None:
    """As ranks of torchrun get it from a terminal, here while they save, in code that may not return."""
    run_dir = Path(config["run_dir"])
    fault = (several, ((slow_writer, (60.0,)), (signal_in_step, (3, signal.SIGINT, [0, 1]))))
    with session(tmp_path / "session", config, fault=fault) as running:
        running.wait_until(lambda: (run_dir / "checkpoints" / ".step_00000003.tmp").exists())
        # the signal comes as step 3 begins: rank 0 may answer before it has counted that step
        cost = re.compile(r"press Ctrl-C again to end now, which loses ([23]) steps \(step \1 began ")
        running.wait_until(lambda: cost.search(running.output(0)) is not None)
        time.sleep(INTERRUPT_REPEAT_S + 0.1)
        running.send(signal.SIGINT)
        assert running.wait(5) == [INTERRUPTED_CODE] * 2, running.output()
        assert running.output().count("megalite: warning: interrupted at once\n") == 1, running.output()
    assert complete(run_dir / "checkpoints") == set()


def test_time_is_up(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """And the time until it is started again is nobody's loss."""
    run_dir = Path(config["run_dir"])
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


@pytest.mark.parametrize("asked", ["by a signal", "while it saves", "by its time limit"])
def test_a_run_that_is_asked_in_its_last_step_is_complete_and_does_not_wait_for_ever(
    asked: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """The export and the mirror could take longer than a scheduler gives; the next run goes on with them."""
    run_dir = Path(config["run_dir"])
    config["training"]["steps"] = 3
    config["checkpoint"] = {"export_hf": "last", "mirror": "file:///proc/no/such/folder"}
    faults, words = [(endless_export, (1.0,))], list[str]()
    if asked == "by a signal":
        faults.append((signal_in_step, (3, signal.SIGTERM, [1])))
    elif asked == "while it saves":
        faults.append((slow_writer, (2.0,)))
    else:
        config["training"]["steps"] = 1
        words.append("training.max_minutes=0.001")
    with session(tmp_path / "session", config, *words, fault=(several, tuple(faults))) as running:
        if asked == "while it saves":
            running.wait_until(lambda: (run_dir / "checkpoints" / ".step_00000003.tmp").exists())
            running.send(signal.SIGTERM)
        assert running.wait(GRACE_S) == [0, 0], running.output()
        said = running.output(0)
    assert "is not made, the run ends before: the next one makes it" in said and "has not got the last" in said
    assert read_status(run_dir).state is RunState.ENDED


def test_the_command_passes_it_on(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """SIGTERM to `megalite train`, as a scheduler sends it, and Ctrl-C to all processes of its terminal."""
    config["training"]["steps"] = 120
    run_dir, path = Path(config["run_dir"]), write_config(tmp_path / "c.yaml", config)
    for number, ending, code in (
        (signal.SIGTERM, "preempted", PREEMPTED_CODE),
        (signal.SIGINT, "interrupted", INTERRUPTED_CODE),
    ):
        done = steps_done(run_dir)
        process = start("train", path)
        deadline = time.monotonic() + 120
        while steps_done(run_dir) < done + 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == code, said
        assert f"megalite: warning: {ending}: signal {number.name}" in said and "Traceback" not in said, said
        assert "stopping after this step; " in said and "[ERROR]" not in said, said
        assert done + 3 <= steps_done(run_dir) < 120
        assert max(complete(run_dir / "checkpoints")) == steps_done(run_dir)
    train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, run_dir, BATCH)


def start(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    """A `megalite` command with a process group of its own, as a shell starts it."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        [str(BIN / "megalite"), *map(str, words)],
        cwd=ROOT,
        env=own | environment,
        stdout=subprocess.DEVNULL if not environment else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}


def test_a_rank_whose_peers_never_come_says_so_and_ends_when_it_is_asked_to(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Variables left over in a shell. It waits in C++, where Python runs no handler."""
    path, port = write_config(tmp_path / "c.yaml", config), str(free_port())
    process = start("train", path, **ALONE, MASTER_PORT=port)
    assert process.stdout is not None
    line = process.stdout.readline()
    while line and "waits for" not in line:  # on a busy machine imports say that they take long
        line = process.stdout.readline()
    assert f"megalite: rank 0 of 8 waits for 7 others at 127.0.0.1:{port} (RANK, WORLD_SIZE, MASTER_ADDR come" in line
    process.terminate()
    said = process.communicate(timeout=5)[1]
    assert process.returncode == PREEMPTED_CODE, said
    assert said.endswith("megalite: warning: ended by SIGTERM during start-up, no step was taken\n"), said
    assert [line for line in said.splitlines()[:-1] if "loading what training needs" not in line] == []


def imports_the_command_line(process: subprocess.Popen[str]) -> bool:
    """Returns whether `launch/__main__.py` has begun: SIGTERM is caught."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def has_opened(file: str | Path, process: subprocess.Popen[str]) -> bool:
    with suppress(FileNotFoundError):  # closed since it was listed
        files = [each.readlink() for each in Path(f"/proc/{process.pid}/fd").iterdir() if int(each.name) > 2]
        return any(str(each).startswith(str(file)) for each in files)
    return False


def test_a_signal_during_start_up_is_one_line(config: dict[str, Any], tmp_path: Path) -> None:
    """In the imports of the command line, while it reads the config, and in the imports of a rank."""
    path, fifo = write_config(tmp_path / "c.yaml", config), tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    kept_open = os.open(fifo, os.O_RDWR)  # so that reading it takes until the signal
    reads_its_config = partial(has_opened, fifo)
    is_rank = partial(has_opened, "pipe:")  # of the signals it has taken
    train_it, check = ("train", path), ("--quiet", "train", fifo, "--dry-run")
    no_step = "during start-up, no step was taken"
    for words, is_there, number, code, sentence in (
        (train_it, imports_the_command_line, signal.SIGINT, INTERRUPTED_CODE, "interrupted"),
        (train_it, imports_the_command_line, signal.SIGUSR1, PREEMPTED_CODE, f"ended by SIGUSR1 {no_step}"),
        (("plan", path), imports_the_command_line, signal.SIGUSR1, 128 + signal.SIGUSR1, "ended by SIGUSR1"),
        (check, reads_its_config, signal.SIGTERM, PREEMPTED_CODE, f"ended by SIGTERM {no_step}"),
        (train_it, is_rank, signal.SIGINT, INTERRUPTED_CODE, f"interrupted {no_step}"),
    ):
        process = start(*words, **(ALONE | {"MASTER_PORT": str(free_port())} if is_there is is_rank else {}))
        deadline = time.monotonic() + 60
        while not is_there(process):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.05)  # the pipe of a rank is there a moment before its thread
        os.killpg(process.pid, number)
        said = process.communicate(timeout=5)[1]
        assert process.returncode == code, said
        assert re.fullmatch(rf"(\[.* rank 0\] )?megalite: warning: {sentence}\n", said), said
    os.close(kept_open)


def test_another_number_of_ranks_is_refused_before_any_waits(config: dict[str, Any], tmp_path: Path) -> None:
    config["parallel"]["data_parallel_size"] = 1
    process = start("train", write_config(tmp_path / "c.yaml", config), **ALONE, MASTER_PORT=str(free_port()))
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 2 and "makes 2 processes, but this run has 8" in said, said
