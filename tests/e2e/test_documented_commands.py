"""Every command that README.md and the Makefile's quickstart show is run, in order, in one working folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands import BIN, ROOT, command_line, metrics, run

pytestmark = pytest.mark.slow

STEPS = 14  # of the quickstart here; `make quickstart` itself takes minutes


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read; what they write stays there."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copytree(ROOT / "docs", folder / "docs")  # text to prepare
    shutil.copy(ROOT / "README.md", folder)
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
    lines = [line for line in printed.splitlines() if "bin/megalite" in line and not line.startswith("echo ")]
    assert [words_of(line)[1][1] for line in lines] == ["prepare", "train", "export", "generate"]
    for line in lines:
        environment, words = words_of(line)
        if words[1] == "train":
            words += [f"training.steps={STEPS}", "training.evaluation.interval=0", "checkpoint.interval=0"]
            done = run(*words, cwd=workplace, OMP_NUM_THREADS=None, **environment)  # as many as a user's have
        else:
            done = command_line(*words[1:], cwd=workplace, env={"DS_ACCELERATOR": "cpu"})
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert len(done.stdout.strip()) > len("def __init__(self"), done.stdout
    losses = [record["loss"] for record in metrics(workplace / "runs/quickstart")]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.8, losses
    assert (workplace / "runs/quickstart/loss.png").stat().st_size > 5_000
    assert (workplace / "runs/quickstart/hf/model.safetensors").exists()


def documented() -> list[str]:
    """The commands of README.md and the guides, once each, in order."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return list(dict.fromkeys(line for page in pages for line in commands_of(page)))


def commands_of(page: Path) -> list[str]:
    """The commands that a page shows."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def starts_no_ranks(words: list[str]) -> bool:
    """Whether the command only reads and prints, so that it can run inside this process."""
    read_only = words[1] in ("config", "plan", "place", "slurm", "k8s", "ray", "status", "ls", "trace") or words[
        1:3
    ] == ["checkpoint", "ls"]
    return Path(words[0]).name == "megalite" and (read_only or "--dry-run" in words)


def test_make_targets_exist() -> None:
    made = [line for line in documented() if line.startswith("make ")]
    targets = re.findall(r"^([\w-]+)(?: [\w-]+)*:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert made and all(line.split()[1] in targets for line in made)


def test_commands_that_start_no_ranks(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run after the quickstart, in this process, for they are many and importing takes longer than they do."""
    from typer.testing import CliRunner

    from launch.cli.app import app

    monkeypatch.chdir(workplace)
    chosen = [words for line in documented() if starts_no_ranks(words := words_of(line)[1])]
    assert len(chosen) >= 12
    for words in chosen:
        if "runs/resized" in words:
            continue  # made by a command that starts ranks
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, f"{words}\n{done.output}\n{done.exception!r}"


def test_options_of_commands_that_start_ranks() -> None:
    """A misspelt option in the documentation is found without starting anything."""
    import typer.main

    from launch.cli.app import app

    megalite = [words for line in documented() if (words := words_of(line)[1])[0] == str(BIN / "megalite")]
    others = [words for words in megalite if not starts_no_ranks(words)]
    assert len(others) >= 15
    for words in others:
        command, arguments = typer.main.get_command(app), words[1:]
        context = command.make_context("megalite", arguments)
        while hasattr(command, "resolve_command"):
            name, command, arguments = command.resolve_command(context, arguments)
            context = command.make_context(name, list(arguments), parent=context)


def test_own_text_is_prepared_as_documented(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/data_preparation.md that start no ranks; the others need what these write."""
    from typer.testing import CliRunner

    from launch.cli.app import app

    monkeypatch.chdir(workplace)
    (workplace / "runs/own_text").mkdir(parents=True)
    said = []
    for line in commands_of(ROOT / "docs/data_preparation.md"):
        words = words_of(line)[1]
        if Path(words[0]).name == "python":
            assert run(*words, cwd=workplace).returncode == 0, line
        elif words[1] == "prepare":
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
            said.append(done.stdout)  # progress is on stderr
    assert [text.split()[:2] for text in said] == [
        ["dry", "run:"], ["runs/own_text/data/text.bin:", f"{len(list(Path('docs').glob('*.md'))) + 1}"],
        ["runs/own_text/data/pages.bin:", "4"],
    ]  # fmt: skip


def test_a_mix_with_a_change_of_its_weights(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of docs/data.md, in order: two runs of the same folder, the second with a stage that is new."""
    from typer.testing import CliRunner

    from launch.cli.app import app

    monkeypatch.chdir(workplace)
    said = {}
    for line in commands_of(ROOT / "docs/data.md"):
        words = words_of(line)[1]
        if words[1] == "train":
            trained = run(*words, cwd=workplace)
            assert trained.returncode == 0 and "Traceback" not in trained.stderr, f"{line}\n{trained.stderr}"
            continue
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
        said[" ".join(words[1:])] = done.stdout
    records = metrics(workplace / "runs/mix")
    assert len(records) == 20 and all(set(one["source_epochs"]) == {"guides", "code", "pages"} for one in records)
    evaluated = [one for one in records if "evaluation_loss" in one]
    assert len(evaluated) >= 3 and all(set(one["evaluation_losses"]) == {"guides", "readme"} for one in evaluated)
    taken = [one["source_tokens"] for one in records]
    before = {name: taken[13][name] for name in taken[13]}
    after = {name: taken[19][name] - taken[13][name] for name in taken[13]}
    assert before["guides"] > before["code"] > before["pages"] and after["pages"] > after["code"] > after["guides"]
    assert "begins after step 14, at sample 112" in trained.stdout
    found = json.loads(said["data find runs/mix --document runs/mix/data/code:4 --json"])
    assert found["samples"] and {one["when"] for one in found["samples"]} == {"read"}
    patterns = ("docs/*.md", "launch/*.py", "configs/*.yaml")
    texts = "\n".join(path.read_text() for pattern in patterns for path in workplace.glob(pattern))
    shown = [line for line in said["data at runs/mix --step 9 --text"].splitlines() if len(line) > 40]
    assert any(line in texts for line in shown), shown


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # some forty whole commands
def test_readme_and_guides(workplace: Path) -> None:
    """After the quickstart, as they say. `make` targets are what CI and `test_quickstart` run."""
    for made in [*workplace.glob("*.*"), *(workplace / "runs").iterdir()]:  # by the other tests, with the same commands
        if made.name not in ("README.md", "quickstart"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    for line in documented():
        if line.startswith("make "):
            continue
        environment, words = words_of(line)
        environment["PATH"] = f"{BIN}:{os.environ['PATH']}"  # as with .venv activated
        done = run(*words, cwd=workplace, **environment)
        good = (0, 1) if "checkpoint diff" in line else (0,)  # 1: they differ, which is what the line is there to show
        assert done.returncode in good and "Traceback" not in done.stderr, f"{line}\n{done.stdout}{done.stderr}"
