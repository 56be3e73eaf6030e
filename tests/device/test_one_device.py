"""Runs on one device to their end, and what a warm step asks it for; the GPU day.

Would catch: a call that only CUDA's dispatch refuses, a wait of the host in the middle of a step, kernels, streams and
events that grow with the steps; a process that does not end, a part of a GPU day that begins anew after a kill.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu_day.store import ROOT
from tests.device.budgets import SORTING, STEPS
from tests.device.runs import steps_of, with_sections


@pytest.mark.parametrize("name", STEPS)
def test_a_run_ends_and_its_steps_keep_to_their_budget(name: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    budget = STEPS[name]
    config = with_sections(tiny, budget.sections)
    environment = {
        "STAND_IN_CAPABILITY": str(budget.capability),
        "STAND_IN_HAZARDS": str(budget.hazards),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # which is not stood in for
    }
    (step,) = steps_of(tmp_path / "session", config, environment=environment)
    version = ".".join(torch.__version__.split(".")[:2])
    launches = budget.other_launches.get(version, budget.launches) + SORTING.get(version, 0)
    budget = replace(budget, launches=launches)
    counted = replace(budget, launches=step.launches, syncs=step.syncs, event_syncs=step.event_syncs, waits=step.waits)
    assert counted == budget, step
    assert (step.streams, step.allocations, step.communicators) == (0, 0, 0), step


@pytest.mark.timeout(900)
def test_a_gpu_day_ends_well_and_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it compares are zeros; verify, which needs numbers, is left out."""
    monkeypatch.setenv("STAND_IN_DEVICES", "1")
    line = [sys.executable, "-m", "benchmarks.gpu_day", "--tiny", "--results", str(tmp_path), "--work", str(tmp_path)]
    line += ["--part", "checklist-trainings", "--part", "levers-1b"]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as day:
        assert day.stdout is not None
        assert next(said for said in day.stdout if said.startswith("checklist-trainings: compiled: ended"))
        for process in [*psutil.Process(day.pid).children(recursive=True), day]:
            process.kill()
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "checklist-trainings: compiled: done before" in done.stdout, done.stdout
