"""Every command that README.md and the Makefile's quickstart show is run, in order, in one working folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.commands import BIN, ROOT, metrics, run

pytestmark = pytest.mark.slow

STEPS = 24  # of the quickstart here; `make quickstart` itself takes minutes


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read; what they write stays there."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "launch").symlink_to(ROOT / "launch")
    return folder


def words_of(line: str) -> tuple[dict[str, str], list[str]]:
    """A documented command: its environment, and its words with the programs of this environment."""
    words = shlex.split(line)
    environment: dict[str, str] = {}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        environment[name] = value
    return environment, [str(BIN / Path(words[0]).name), *words[1:]]


def test_quickstart(workplace: Path) -> None:
    """The recipe as make prints it, fewer steps: the loss must fall, and a sample must come out of transformers."""
    printed = subprocess.run(["make", "-n", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.splitlines() if "bin/megalite" in line]
    assert [words_of(line)[1][1] for line in lines] == ["prepare", "train", "export", "generate"]
    for line in lines:
        environment, words = words_of(line)
        if words[1] == "train":
            words += [f"training.steps={STEPS}", "training.evaluation.interval=0", "checkpoint.interval=0"]
        done = run(*words, cwd=workplace, **environment)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert len(done.stdout.strip()) > len("def __init__(self"), done.stdout
    losses = [record["loss"] for record in metrics(workplace / "runs/quickstart")]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.8, losses
    assert (workplace / "runs/quickstart/loss.png").stat().st_size > 5_000
    assert (workplace / "runs/quickstart/hf/model.safetensors").exists()


@pytest.mark.timeout(1200)  # some twenty whole commands
def test_readme_and_guides(workplace: Path) -> None:
    """After the quickstart, as they say. `make` targets are what CI and `test_quickstart` run."""
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    blocks = [block for text in texts for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)]
    lines = list(dict.fromkeys(line for block in blocks for line in block.splitlines()))
    made = [line for line in lines if line.startswith("make ")]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert made and all(line.removeprefix("make ") in targets for line in made)
    others = [line for line in lines if not line.startswith("make ")]
    assert len(others) >= 6
    for line in others:
        environment, words = words_of(line)
        environment["PATH"] = f"{BIN}:{os.environ['PATH']}"  # as with .venv activated
        done = run(*words, cwd=workplace, **environment)
        good = (0, 1) if "checkpoint diff" in line else (0,)  # 1: they differ, which is what the line is there to show
        assert done.returncode in good and "Traceback" not in done.stderr, f"{line}\n{done.stdout}{done.stderr}"
