"""Runs on one device to their end, and what a warm step asks it for.

Would catch: a call that only CUDA's dispatch refuses, a wait of the host in the middle of a step, kernels, streams and
events that grow with the steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.device.budgets import STEPS
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
    counted = replace(budget, launches=step.launches, syncs=step.syncs, event_syncs=step.event_syncs, waits=step.waits)
    assert counted == budget, step
    assert (step.streams, step.allocations, step.communicators) == (0, 0, 0), step
