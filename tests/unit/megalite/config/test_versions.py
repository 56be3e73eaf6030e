"""The version of the code that runs, installed or not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megalite.config import versions
from tests.helpers.commands import ROOT


def test_the_version_is_that_of_the_checkout_and_else_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that was carried to a machine has no metadata, and one that is installed may have older ones."""
    own = versions.own_version.__wrapped__
    metadata = {"megalite": "0.0.1"}
    monkeypatch.setattr(versions, "installed_version", metadata.get)
    assert own() == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "megalite" / "config" / "versions.py"))
    for beside in (None, "[project]\nname = 'another'\nversion = '9'\n", "[tool]\n", "no toml"):
        if beside is not None:
            (tmp_path / "pyproject.toml").write_text(beside)
        assert own() == "0.0.1", beside
    metadata.clear()
    assert own() == "unknown"


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert versions.installed_version("torch") and versions.installed_version("no-such-package") is None
