"""The order of files in a run of all tiers, and what is kept for it. A wrong order only costs time, which no other test
would say."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.conftest import tier_of
from tests.helpers import durations


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_tiers_are_mixed_and_the_longest_files_of_each_come_first() -> None:
    files = {"tests/e2e/a.py": 1, "tests/e2e/b.py": 3, "tests/unit/c.py": 10, "tests/unit/d.py": 30}
    tests = [f"{file}::test_{index}" for file, count in files.items() for index in range(count)]
    first = {"tests/e2e/b.py": 0.0, "tests/unit/d.py": 0.0}
    last = {"tests/e2e/a.py": 0.8 * 0.75, "tests/unit/c.py": 0.75}
    assert durations.order_of_files(tests, tier_of) == pytest.approx(first | last)
    durations.keep("e2e", {"tests/e2e/a.py::test_0": 45.0})  # as long as three of the guesses
    assert durations.order_of_files(tests, tier_of)["tests/e2e/b.py"] == pytest.approx(0.8 * 0.75)


def test_a_run_of_some_files_keeps_the_times_of_the_others() -> None:
    durations.keep("unit", {"tests/unit/a.py::test_gone": 1.0, "tests/unit/b.py::test": 2.0})
    durations.keep("unit", {"tests/unit/a.py::test_new": 3.0})
    assert durations.kept("unit") == {"tests/unit/a.py::test_new": 3.0, "tests/unit/b.py::test": 2.0}
    durations.FOLDER.joinpath("unit.json").write_text("{")
    assert durations.kept("unit") == {}


def test_a_machine_is_as_slow_as_its_work_takes_longer_and_its_host_withholds() -> None:
    slowness = durations.Slowness()
    slowness._began_s -= 1e6
    slowness._taken_s = [2 * slowness._REFERENCE_S, 4 * slowness._REFERENCE_S]
    assert slowness.factor() == pytest.approx(3.0, rel=1e-2)
    slowness._withheld_s -= 1e6 * psutil.cpu_count() / 2
    assert slowness.factor() == pytest.approx(6.0, rel=1e-2)
    slowness._taken_s = [slowness._REFERENCE_S / 9]
    assert slowness.factor() == 1.0
