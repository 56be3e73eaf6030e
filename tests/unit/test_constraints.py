"""The constraints files in requirements/ fit pyproject.toml and each other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements.audit import findings

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
    assert not [
        package for package in pinned(name) if package.startswith(OF_CUDA_BUILDS) and package != "nvidia-ml-py"
    ]  # Python alone, and of no build


@pytest.mark.parametrize("installer", ["UV=", "UV=uv"])
def test_quickstart_installs_the_core_only(installer: str) -> None:
    """What only the development needs has cost newcomers 13 minutes of pip before the first step."""
    make = ["make", "-n", "-B", "VENV=nowhere", installer, "quickstart"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in printed.splitlines() if "pip install" in line and " -e " in line]
    assert len(installs) == 1 and installs[0].endswith("-c requirements/core.txt -e '.'"), printed


@pytest.mark.parametrize("name", ["core", "dev"])
def test_a_lock_holds_the_same_versions_with_hashes(name: str) -> None:
    """A lock that is older than its constraints installs other versions than those that are tested together."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text().replace("\\\n", " ")
    entries = [line.split() for line in text.splitlines()]
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for _, *hashes in entries for word in hashes)
    assert all(len(entry) > 1 for entry in entries), "pip refuses a package without a hash only when it installs"
    locked = {entry[0].partition("==")[0]: Version(entry[0].partition("==")[2]) for entry in entries}
    wanted = pinned(name)
    del wanted["torch"]  # each build has its own hash
    assert locked == wanted, "run `make constraints`"


AUDITED = [
    {"name": "jinja2", "version": "3.1.5", "vulns": [{"id": "CVE-2025-27516", "fix_versions": ["3.1.6"]}]},
    {"name": "numpy", "version": "2.4", "vulns": []},
    {"name": "ours", "skip_reason": "Dependency not found on PyPI and could not be audited: ours (1)"},
]


@pytest.mark.parametrize(
    ("packages", "code", "told"),
    [
        (AUDITED[:2], 1, "jinja2 3.1.5: CVE-2025-27516, mended in 3.1.6"),
        (AUDITED[1:2], 0, "no vulnerability of its 1 packages is known"),
        (AUDITED[1:], 2, "of the 2 packages in dev.txt, not ours could be looked up"),
        (AUDITED[2:], 2, "none of them could be looked up"),
    ],
    ids=["known", "none", "left out", "unreachable"],
)
def test_an_audit_that_saw_nothing_is_no_success(packages: list[dict[str, Any]], code: int, told: str) -> None:
    """pip-audit ends with 0 where its database has none of the packages, as behind a copy of PyPI."""
    lines, found = findings(packages, "dev.txt")
    assert found == code and any(told in line for line in lines)


def test_an_audit_without_a_database_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "pip-audit"
    broken.write_text("#!/bin/sh\necho 'a traceback\nConnectionError: no route' >&2\nexit 1\n")
    broken.chmod(0o700)
    script = str(ROOT / "requirements" / "audit.py")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    done = subprocess.run([python, script, "dev.txt"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is PyPI reachable from here? (ConnectionError: no route)" in done.stderr
