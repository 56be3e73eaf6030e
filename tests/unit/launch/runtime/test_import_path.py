"""No code of the current folder runs: a downloaded folder may hold a `torch` of its own, which Python takes first."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.runtime.import_path import import_variables
from launch.runtime.started_modules import INSTALLATION, python_command
from tests.helpers.canaries import loaded_from, plant
from tests.helpers.commands import BIN

PROBE = """
import json, os, sys
from launch.runtime.import_path import exclude_current_folder
said = exclude_current_folder()
found = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
print(json.dumps({"said": said, "path": sys.path, **found}))
"""
SAFE = {
    "started_modules.py": 1,
    "gpu_probe.py": 1,
    "this_machine.py": 1,
    "connection.py": 1,
    "cpu_adam.py": 1,
}  # file -> command lines of a Python, all of them safe


def command_lines(path: Path) -> Iterator[list[str]]:
    """The constant words that follow `sys.executable` in lists and in f-strings of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else getattr(node, "values", [])
        after = [index + 1 for index, word in enumerate(words) if "sys.executable" in ast.unparse(word)]
        if after and isinstance(node, ast.List | ast.Tuple | ast.JoinedStr):
            yield [str(word.value) for word in words[after[0] :] if isinstance(word, ast.Constant)]


def test_every_python_that_the_product_starts_has_a_safe_path() -> None:
    """A command line that is built anywhere else would take code from the current folder again."""
    found: dict[str, int] = {}
    for package in ("launch", "megalite", "models", "data_pipeline"):
        for path in (INSTALLATION / package).rglob("*.py"):
            for words in command_lines(path):
                found[path.name] = found.get(path.name, 0) + 1
                assert words[0].split()[0] in ("-P", "-I"), f"{path}: a Python is started with {words}"
    assert found == SAFE
    assert python_command("module", "word")[1:] == ["-P", "-u", "-m", "module", "word"]


def probe(folder: Path, python_path: str | None, *, safe: bool = False) -> dict[str, object]:
    """What is on the path of a module of `folder` that Python starts from there, after the exclusion."""
    (folder / "probe.py").write_text(PROBE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {} if python_path is None else {"PYTHONPATH": python_path}
    command = [sys.executable, *(["-P", "probe.py"] if safe else ["-m", "probe"])]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_the_current_folder_leaves_the_path(tmp_path: Path) -> None:
    found = probe(tmp_path, None)
    assert str(tmp_path) not in found["path"] and "" not in found["path"]  # type: ignore[operator]
    assert (found["said"], found["PYTHONPATH"], found["PYTHONSAFEPATH"]) == (None, None, "1")


@pytest.mark.parametrize("entry", ["", ".", "src"])
def test_an_entry_that_depends_on_the_current_folder_leaves_the_path(entry: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "own").mkdir()
    found = probe(tmp_path, f"{entry}:{tmp_path / 'own'}", safe=True)
    assert os.path.normpath(tmp_path / entry) not in found["path"] and str(tmp_path / "own") in found["path"]  # type: ignore[operator]
    assert found["PYTHONPATH"] == str(tmp_path / "own")
    assert str(found["said"]).startswith(f"PYTHONPATH has {entry or 'an empty entry'}, which means the current folder")


def test_a_checkout_that_is_the_current_folder_stays_on_the_path() -> None:
    """`python -m launch` there works without an installation, and so do its children, which are told where it is."""
    command, here = [sys.executable, "-c", PROBE], {"PYTHONPATH": "."}
    done = subprocess.run(command, cwd=INSTALLATION, env=here, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert str(INSTALLATION) in found["path"] and found["PYTHONPATH"] == str(INSTALLATION) and found["said"] is None


def test_what_travels_names_full_paths_alone() -> None:
    checkout = str(INSTALLATION)
    assert import_variables({}) == {"PYTHONPATH": checkout, "PYTHONSAFEPATH": "1"}
    assert import_variables({"PYTHONPATH": f":.:src:/one:{checkout}"})["PYTHONPATH"] == f"{checkout}:/one"


def test_a_command_is_started_without_code_of_the_folder(tmp_path: Path) -> None:
    """The command and the process above it; ranks are in the tests of whole runs."""
    folder = plant(tmp_path / "download")
    inner = f"import megalite, sys; assert {str(folder)!r} not in sys.path"
    (folder / "run.py").write_text(inner)
    options = ["--restarts", "0", "--run-dir", str(tmp_path / "run"), "--"]
    for command in ([sys.executable, "-c", inner], [sys.executable, "run.py"]):
        done = subprocess.run(
            [BIN / "megalite", "supervise", *options, *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert loaded_from(folder) == [] and done.returncode == 0, done.stderr


def test_a_command_that_needs_the_folder_is_told_once(tmp_path: Path) -> None:
    """Its own traceback names the module, whatever has started the Python that did not find it."""
    (tmp_path / "helpers.py").touch()
    (tmp_path / "mine.py").write_text("import os, helpers")
    (tmp_path / "run.sh").write_text(f"exec {sys.executable} mine.py")
    options = ["--restarts", "1", "--first-wait", "0", "--run-dir", str(tmp_path / "run"), "--", "sh", "run.sh"]
    for way_out, code, times in (({}, 1, 1), ({"PYTHONSAFEPATH": ""}, 0, 0), ({"PYTHONPATH": str(tmp_path)}, 0, 0)):
        done = subprocess.run(
            [BIN / "megalite", "supervise", *options],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | way_out,
            capture_output=True,
            text=True,
            check=False,
        )
        told = done.stderr.count("if the command did not find a module of yours")
        assert (done.returncode, told) == (code, times), done.stderr
        assert done.stderr.count("No module named 'helpers'") == 2 * times
