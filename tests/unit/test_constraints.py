"""The constraints files in requirements/ fit pyproject.toml and each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_CUDA_BUILDS = ("nvidia-", "cuda-", "triton")  # each CUDA build of torch names its own, and other builds have none


def pinned(name: str) -> dict[str, Version]:
    """Package -> the one version that `requirements/NAME.txt` allows. Anything but `package==version` is refused."""
    lines = [
        line for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines() if not line.startswith("#")
    ]
    pins = [re.fullmatch(r"([a-z0-9-]+)==([^\s+;]+)", line) for line in lines]
    odd = [line for line, pin in zip(lines, pins, strict=True) if pin is None]
    assert not odd, f"requirements/{name}.txt: not package==version, or of one build only: {odd}"
    return {pin[1]: Version(pin[2]) for pin in pins if pin}


def requirements(lines: list[str]) -> list[Requirement]:
    """What `lines` of pyproject.toml ask for, without the project's own extras, which stand there themselves."""
    return [wanted for line in lines if (wanted := Requirement(line)).name != PROJECT["name"]]


CORE = requirements(PROJECT["dependencies"])
FURTHER = requirements([line for lines in EXTRAS.values() for line in lines])


@pytest.mark.parametrize(("name", "wanted"), [("core", CORE), ("dev", CORE + FURTHER)])
def test_every_dependency_is_pinned_inside_its_range(name: str, wanted: list[Requirement]) -> None:
    """A dependency that was added or moved without `make constraints` is installed untested, or not at all."""
    pins = pinned(name)
    missing = [str(one) for one in wanted if canonicalize_name(one.name) not in pins]
    assert not missing, f"requirements/{name}.txt lacks {missing}: run `make constraints`"
    outside = [
        str(one) for one in wanted if not one.specifier.contains(pins[canonicalize_name(one.name)], prereleases=True)
    ]
    assert not outside, f"requirements/{name}.txt pins other versions than {outside}: run `make constraints`"


def test_dev_holds_the_core() -> None:
    """With two versions of one package, `make test` after `make quickstart` would install it again."""
    differ = dict(pinned("core").items() - pinned("dev").items())
    assert not differ, f"requirements/dev.txt has other versions of these, or none: {differ}; run `make constraints`"


def test_core_holds_nothing_of_the_extras() -> None:
    """An extra's package among the core's makes every user download it."""
    core = {canonicalize_name(one.name) for one in CORE}
    extras = {canonicalize_name(one.name) for one in FURTHER} - core
    assert not extras & pinned("core").keys()


@pytest.mark.parametrize("name", ["core", "dev"])
def test_the_build_of_torch_is_free(name: str) -> None:
    """A pin of a CUDA library breaks the torch builds for other CUDA versions; torch itself names what it needs."""
    assert not [package for package in pinned(name) if package.startswith(OF_CUDA_BUILDS)]


@pytest.mark.parametrize("installer", ["UV=", "UV=uv"])
def test_quickstart_installs_the_core_only(installer: str) -> None:
    """What only the development needs has cost newcomers 13 minutes of pip before the first step."""
    make = ["make", "-n", "-B", "VENV=nowhere", installer, "quickstart"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in printed.splitlines() if "pip install" in line and " -e " in line]
    assert len(installs) == 1 and installs[0].endswith("-c requirements/core.txt -e '.'"), printed
