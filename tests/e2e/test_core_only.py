"""Every module imports where only the core is installed: what extras bring is imported where it is used."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest
from packaging.utils import canonicalize_name

from tests.helpers.commands import ROOT

IMPORT_ALL = """
import importlib, json, pkgutil, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None  # importing it now raises ImportError, as if it were not installed
for room in ("megalite", "models", "data_pipeline", "launch"):
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        importlib.import_module(module.name)
"""


def packages(name: str) -> set[str]:
    """The packages that `requirements/NAME.txt` pins."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return {line.partition("==")[0] for line in lines}


@pytest.mark.slow  # torch, DeepSpeed and transformers are imported anew
def test_the_core_imports_without_extras() -> None:
    """An import of an extra's package at the top of a module breaks every command after `pip install megalite`."""
    further = packages("dev") - packages("core")
    brings = importlib.metadata.packages_distributions()
    blocked = [name for name, by in brings.items() if all(canonicalize_name(one) in further for one in by)]
    assert {"pytest", "ray", "s3fs", "kubernetes"} <= set(blocked)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(blocked)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
