"""A checkpoint to be damaged, for the tests that ask for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.damaging import write


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks that stays as it is."""
    return write(tmp_path_factory.mktemp("whole") / "step_00000001")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(whole, tmp_path / whole.name)
