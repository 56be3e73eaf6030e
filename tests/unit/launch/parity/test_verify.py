"""`megalite verify` while it computes: what takes long is told, on stderr alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from launch import output
from launch.parity import verify
from launch.parity.diagnosis import LayoutResult
from launch.parity.layout import ParityLayout
from megalite.config import load_config
from tests.helpers.commands import ROOT

SLOW_S = 0.3


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """References and ranks that take long and compute nothing."""

    class SlowReferences:
        near_choices = 0

        def __init__(self, plan: verify.Plan, dtype: str) -> None:
            time.sleep(SLOW_S)
            self.problem = plan.problem

        def answer(self, accumulation: int) -> None:
            assert accumulation == 1

    def run(session: Any, layout: ParityLayout) -> LayoutResult:
        time.sleep(SLOW_S)
        return LayoutResult(layout, "fp32", SLOW_S)

    monkeypatch.setattr(verify, "References", SlowReferences)
    monkeypatch.setattr(verify.Session, "run", run)
    monkeypatch.setattr(verify, "warm_up", lambda environment: None)


def lines_of_a_run(capsys: pytest.CaptureFixture[str]) -> list[str]:
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    assert verify.verify(verify.make_plan(config, layouts="tp=2;pp=2", seed=0)).passed
    seen = capsys.readouterr()
    assert seen.out == "", "standard output is for the result"
    return seen.err.splitlines()


def test_what_takes_long_is_told_while_it_goes_on(
    slow: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference alone took 90 s of silence on a slow machine, which looks like a hang."""
    monkeypatch.setattr(output, "SILENCE_S", SLOW_S / 30)
    told = [line.rpartition(" (")[0] for line in lines_of_a_run(capsys)]
    assert [line for place, line in enumerate(told) if line not in told[:place]] == [
        "",  # the reference's own line
        "megalite: loading PyTorch and computing the reference in float64 and fp32",
        "megalite: [1/2] fp32 tp=2: starting 2 ranks, training and comparing",
        "[1/2] fp32 tp=2: pass",
        "megalite: [2/2] fp32 pp=2: starting 2 ranks, training and comparing",
        "[2/2] fp32 pp=2: pass",
    ]


def test_what_is_quick_is_not_told(slow: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of_a_run(capsys) == [
        "reference: transformers in float64 and fp32 on one process",
        "[1/2] fp32 tp=2: pass (0.3 s)",
        "[2/2] fp32 pp=2: pass (0.3 s)",
    ]
