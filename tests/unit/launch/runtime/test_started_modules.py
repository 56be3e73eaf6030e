"""Names of modules inside command lines: an import that moves is found by the linter, a name in a string only here."""

from __future__ import annotations

import importlib.util

import pytest

from launch.runtime import started_modules

STARTED = {
    name: value
    for name, value in vars(started_modules).items()
    if name.isupper() and isinstance(value, str) and not name.startswith("_")
}
FILES = ("RANK_SCRIPT", "HOST_PROBE", "AGENT")


@pytest.mark.parametrize("name", sorted(STARTED))
def test_a_module_that_is_started_by_name_exists(name: str) -> None:
    assert importlib.util.find_spec(STARTED[name]) is not None


def test_a_package_that_is_started_by_name_has_a_main_module() -> None:
    assert importlib.util.find_spec(f"{started_modules.COMMAND_LINE}.__main__") is not None


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_started_or_sent_exists(name: str) -> None:
    assert getattr(started_modules, name).is_file()


def test_the_installation_holds_all_packages() -> None:
    assert all((started_modules.INSTALLATION / package).is_dir() for package in ("launch", "megalite", "models"))
