"""The command line as other programs meet it: help, JSON, and a start without torch."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from launch import __main__ as entry
from launch.cli.app import COMMANDS as LISTED
from launch.cli.app import app, load
from launch.errors import LaunchError
from launch.runtime.checkout import git_state
from launch.runtime.logs import LEVEL, configure_logging
from launch.trainer.start.layout_table import layout_rows
from megalite.config import load_config, resolve_layout
from tests.conftest import write_config
from tests.helpers.commands import command_line
from tests.unit.test_docs import problems_of

MEGALITE = Path(sys.executable).parent / "megalite"
COMMANDS = [
    ["train"],
    ["supervise"],
    ["verify"],
    ["prepare"],
    ["import"],
    ["export"],
    ["generate"],
    ["evaluate"],
    ["launch"],
    ["doctor"],
    ["place"],
    ["slurm"],
    ["k8s"],
    ["ray"],
    ["status"],
    ["ls"],
    ["compare"],
    ["watch"],
    ["trace"],
    ["report"],
    ["bench"],
    ["scaling"],
    ["config", "show"],
    ["config", "init"],
    ["config", "explain"],
    ["config", "schema"],
    ["checkpoint", "ls"],
    ["checkpoint", "show"],
    ["checkpoint", "verify"],
    ["checkpoint", "diff"],
    ["checkpoint", "prune"],
]


def megalite(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MEGALITE, *arguments], capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0
    assert f"megalite {' '.join(words)}" in " ".join(done.output.split("Example:")[1].split())


def test_the_help_has_an_example_of_the_way_from_text_to_a_model() -> None:
    """The first page that a newcomer sees; its commands name options that exist."""
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    examples = shown.partition("Example:")[2].partition("╭")[0].split("•")[1:]
    assert [line.split()[:3] for line in examples] == [
        ["megalite", "prepare", "python-stdlib"],
        ["megalite", "train", "configs/quickstart.yaml"],
        ["megalite", "verify", "configs/quickstart.yaml"],
    ]
    assert [problem for line in examples for problem in problems_of(line.strip())] == []


def test_every_command_is_listed_with_the_first_sentence_of_its_own_help() -> None:
    """The list is told without importing the commands, so that it could be another than their docstrings."""
    assert set(LISTED) == {words[0] for words in COMMANDS} | {"data", "plan"}
    own = {name: " ".join((load(name).help or "").partition("\n\n")[0].split()) for name in LISTED}
    assert own == LISTED


def test_the_help_imports_neither_a_command_nor_the_config() -> None:
    """Importing them would double the time until it is there, of which the import of rich takes most."""
    code = "import sys; from launch.__main__ import main; sys.argv = ['megalite', '--help']; main()"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "launch.cli.app" in imported and "Usage: megalite" in done.stdout
    ours = {name for name in imported if name.startswith("launch.cli.")}
    assert ours == {"launch.cli.app", "launch.cli.verbosity", "launch.cli.version"}
    assert not {"pydantic", "yaml", "megalite.config.config"} & imported


@pytest.mark.parametrize("line", ["launch.cli.app", "megalite.config.config", "launch.trainer.local_run"])
def test_starting_needs_no_torch(line: str) -> None:
    """Config errors, planning and the help of any command must not wait for torch."""
    if line == "launch.cli.app":
        line += "; [launch.cli.app.load(name) for name in launch.cli.app.COMMANDS]"
    code = f"import sys, {line}\nassert not {{'torch', 'deepspeed', 'transformers'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_four_packages_are_this_repository() -> None:
    """`models` and `launch` are common names: an installed stranger must not win."""
    code = (
        "import megalite as a, models as b, data_pipeline as c, launch as d; print(*(p.__path__ for p in (a, b, c, d)))"
    )
    root = Path(__file__).resolve().parents[4]
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    for name in ("megalite", "models", "data_pipeline", "launch"):
        assert f"'{root / name}'" in printed


def test_dry_run_tells_who_holds_what_and_starts_nothing(tiny: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", tiny)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    words = [f"parallel.{name}={value}" for name, value in {**sizes, "pipeline_schedule": "1f1b"}.items()]
    done = command_line("train", str(path), *words, "--dry-run", "--json", env={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["layout"]["world_size"] == 8 and len(plan["ranks"]) == 8
    assert [row["stage"] for row in plan["ranks"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    held = [name for rank in (0, 4) for name in plan["ranks"][rank]["layers"]]
    assert held == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head"]
    assert not Path(tiny["run_dir"]).exists()
    shown = command_line("train", str(path), *words, "--dry-run", env={"DS_ACCELERATOR": "cpu", "COLUMNS": "200"})
    assert "tensor 2 x pipeline 2 x data 2" in shown.stdout and "layers 0-1" in shown.stdout
    assert plan["summary"]["layout"]["ranks"] == 8 and plan["predicted"]["memory"]["available_bytes"] > 0
    assert "optimizer:" not in shown.stdout and "weight_decay" not in shown.stdout
    wide = {"DS_ACCELERATOR": "cpu", "COLUMNS": "200"}
    whole = command_line("train", str(path), *words, "--dry-run", "--full", env=wide)
    assert "weight_decay: 0.1" in whole.stdout and "layers 0-1" in whole.stdout and "│    7 │" in whole.stdout


def test_parameters_per_rank_add_up_to_the_model(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Against transformers' own count, with sizes that need no padding at tensor parallel 2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = load_config(write_config(tmp_path / "c.yaml", tiny), ["parallel.pipeline_parallel_size=3"])
    rows = layout_rows(config, resolve_layout(config, 3, "cpu"))
    shape = config.model.model_dump(exclude={"model_type", "normalization", "gated_mlp"})
    theirs = LlamaForCausalLM(LlamaConfig(**shape)).num_parameters()
    assert sum(row.parameters for row in rows) == theirs


def test_config_show_is_a_config_and_schema_a_schema(tiny: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", tiny)
    shown = command_line("config", "show", str(path), "training.steps=7")
    again = write_config(tmp_path / "again.yaml", yaml.safe_load(shown.stdout))
    assert load_config(again) == load_config(path, ["training.steps=7"])
    schema = json.loads(command_line("config", "schema").stdout)
    assert "tensor_parallel_size" in json.dumps(schema)


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_every_config_in_the_repository_loads(path: Path) -> None:
    assert load_config(path).total_steps > 0


def test_a_dry_run_under_a_launcher_starts_nothing(tiny: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", tiny)
    under = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    done = megalite("train", str(path), "--dry-run", env=under)
    assert done.returncode == 0 and "nothing was started" in done.stdout, done.stderr
    assert not Path(tiny["run_dir"]).exists()


@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize(("option", "has_notices"), [([], True), (["-q"], False), (["--verbose"], True)])
def test_quiet_keeps_results_and_drops_notices(
    option: list[str], place: int, has_notices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEVEL, "INFO")  # restored afterwards, as the options set it
    configure_logging()
    try:
        command = ["plan", "reliability", "--gpus", "64"]
        done = CliRunner().invoke(app, [*command[:place], *option, *command[place:]])
    finally:
        monkeypatch.undo()
        configure_logging()
    assert done.exit_code == 0 and "goodput" in done.stdout
    assert ("megalite: " in done.stdout) == has_notices


@pytest.mark.parametrize("words", ["--quiet --verbose config schema", "-q config schema -v", "config schema -q -v"])
def test_quiet_and_verbose_exclude_each_other(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL, "INFO")
    try:
        with pytest.raises(LaunchError, match="contradict"):
            CliRunner().invoke(app, words.split(), catch_exceptions=False)
    finally:
        monkeypatch.undo()
        configure_logging()


@pytest.mark.parametrize("words", ["--version", "config schema"])
def test_an_output_that_cannot_be_written_is_one_sentence(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([MEGALITE, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("megalite: error: standard output cannot be written: No space left on device")
    assert done.stderr.count("\n") == 1


def test_options_of_a_supervised_command_are_its_own() -> None:
    """`-q` behind COMMAND belongs to COMMAND."""
    command = load("supervise")
    context = command.make_context("supervise", ["--restarts", "1", "python", "-q", "x.yaml"])
    assert context.params["command"] == ["python", "-q", "x.yaml"]


def test_version_names_what_a_report_needs() -> None:
    """Without torch, in a second: `importlib.metadata` knows the versions."""
    done = megalite("--version")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith(f"megalite {version('megalite')}")
    assert [line.split()[0] for line in lines[:6]] == [
        *("megalite", "torch", "deepspeed", "transformers", "numpy", "python"),
    ]
    assert f"torch {version('torch')}" in lines and f"deepspeed {version('deepspeed')}" in lines


def test_a_checkout_names_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only its own: an environment inside another project's checkout is none of ours."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "--allow-empty"]
    subprocess.run([*commit, "-m", "first"], check=True)
    monkeypatch.setattr("launch.runtime.checkout.INSTALLATION", tmp_path)
    state = git_state()
    assert state is not None and len(state["commit"]) == 40 and not state["changed"]
    inside = tmp_path / "site-packages"
    inside.mkdir()
    monkeypatch.setattr("launch.runtime.checkout.INSTALLATION", inside)
    assert git_state() is None


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("megalite pl", {"place", "plan"}, {"train"}),
        ("megalite train --dry", {"--dry-run"}, {"--json"}),
        ("megalite config ", {"show", "init", "explain", "schema"}, {"train"}),
        ("megalite config explain training.s", {"training.steps", "training.seed"}, {"training.tokens"}),
    ],
)
def test_bash_completes(line: str, offered: set[str], not_offered: set[str], tmp_path: Path) -> None:
    """As bash does it: the script of --show-completion is read, and its function asked."""
    words = line.split(" ")
    script = tmp_path / "completion.sh"
    script.write_text(megalite("--show-completion", "bash").stdout)
    ask = (
        f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; "
        'function=$(complete -p megalite | grep -o -- "-F [^ ]*" | cut -c4-); $function megalite; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = {**os.environ, "PATH": f"{MEGALITE.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60, check=False, env=path)
    found = set(done.stdout.split())
    assert offered <= found and not found & not_offered, done


def test_a_package_that_is_not_there_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine to which only some packages were carried; a part that is missing inside of one is a traceback."""

    def ends_with(name: str) -> Callable[[], None]:
        def run() -> None:
            importlib.import_module(name)

        return run

    monkeypatch.setattr("launch.cli.app.main", ends_with("no_such_package"))
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == 2
    assert f"error: there is no package no_such_package in {sys.prefix}: install" in capsys.readouterr().err
    monkeypatch.setattr("launch.cli.app.main", ends_with("json.no_such_part"))
    with pytest.raises(ModuleNotFoundError):
        entry.main()
