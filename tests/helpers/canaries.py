"""Modules such as a downloaded folder may hold, named like those that megalite needs: they tell who loads them."""

from __future__ import annotations

from pathlib import Path

NAMES = (
    *("launch", "megalite", "models", "deepspeed", "torch", "numpy", "yaml", "psutil", "transformers"),
    "usercustomize",  # Python itself loads it
)
TELLS = """
import sys
with open({told!r}, "a") as file:
    file.write(f"{{__name__}} by {{' '.join(sys.orig_argv)[:200]}}\\n")
raise ImportError("a module of the current folder was loaded")
"""


def plant(folder: Path) -> Path:
    """Makes the modules in `folder`, some as files and some as packages; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(NAMES):
        path = folder / f"{name}.py" if number % 2 else folder / name / "__init__.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(TELLS.format(told=str(folder / "told")))
    return folder


def loaded_from(folder: Path) -> list[str]:
    """The modules that were loaded, and the commands that did so."""
    told = folder / "told"
    return told.read_text().splitlines() if told.exists() else []
