"""`megalite config init` and `explain`, from the outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from launch.cli.app import app
from launch.cli.config import explain
from launch.errors import LaunchError
from launch.trainer.start.run_config import load_run_config
from megalite.config import Config, load_config
from megalite.config.suggestions import option_paths
from tests.helpers.sizes import TINY_SIZES

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | TINY_SIZES


def config(*words: str) -> str:
    done = CliRunner().invoke(app, ["config", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_first_config_loads_and_explains_each_option(tmp_path: Path) -> None:
    path = tmp_path / "first.yaml"
    assert str(path) in config("init", "-o", str(path))
    loaded = load_config(path)
    assert loaded.total_steps == 1000 and loaded.model.tie_word_embeddings
    lines = path.read_text().splitlines()
    options = [n for n, line in enumerate(lines) if line.startswith("  ") and not line.lstrip().startswith("#")]
    assert len(options) > 25
    unexplained = [lines[n] for n in options if lines[n].startswith("  ") and lines[n][2] != " "]
    assert all("#" in lines[n - 1] for n in options if lines[n][2] != " "), unexplained
    assert max(map(len, lines)) <= 120


def test_a_first_config_trains_on_up_to_eight_devices(tmp_path: Path) -> None:
    """Its batch and its held-out samples must be multiples of what that many replicas take at once."""
    path = tmp_path / "first.yaml"
    config("init", "-o", str(path))
    for replicas in (1, 2, 4, 8):
        load_config(path, [f"parallel.data_parallel_size={replicas}"])


def test_a_first_config_from_a_hugging_face_folder_leaves_its_sizes_there(tmp_path: Path) -> None:
    folder, path = tmp_path / "some model", tmp_path / "tuned.yaml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    config("init", "--from", str(folder), "-o", str(path))
    assert "model" not in yaml.safe_load(path.read_text())
    loaded = load_run_config(path)
    assert loaded.training.initialize_from == folder and loaded.model.hidden_size == 32
    assert loaded.training.sequence_length == 128, "no longer than the model is meant for"
    assert f"megalite prepare YOUR_TEXT -t '{folder}'" in path.read_text()


def test_init_overwrites_nothing_unasked(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    with pytest.raises(LaunchError, match=r"mine\.yaml is there already: give --overwrite"):
        config("init", "-o", str(path))
    assert path.read_text() == "mine"
    config("init", "-o", str(path), "--overwrite")
    load_config(path)


def test_init_names_the_folder_that_it_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=f"{tmp_path}/nowhere is no folder with a config.json"):
        config("init", "--from", "nowhere")


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["training.steps"], ["training.steps: integer above 0 or null", "Length of the run", "training.steps=1000"]),
        (["optimizer.betas"], ["list of 2, each number from 0 to below 1; default [0.9, 0.95]"]),
        (["model.vocab_size"], ["integer above 0; required"]),
        (["parallel.zero_stage"], ["0, 1, 2, 3 or auto; default 1"]),
        (["training"], ["global_batch_size", "evaluation", "Batch, length, seed"]),
        (["model.rope_scaling.factor"], ["number above 0 or null"]),
        (["deepspeed.zero_optimization.overlap_comm"], ["passed on to DeepSpeed"]),
        ([], ["run_dir", "training", "deepspeed"]),
    ],
    ids=str,
)
def test_explain_tells_values_default_meaning_and_an_example(words: list[str], fragments: list[str]) -> None:
    said = config("explain", *words)
    assert all(fragment in said for fragment in fragments), said


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("steps", 'did you mean "training.steps"'),
        ("optimizer.lr", 'did you mean "optimizer.learning_rate"'),
        ("zebra", "the config has run_dir, model"),
        ("deepspeed.train_batch_size", "training.global_batch_size"),
        ("training.", "unknown option"),
    ],
)
def test_explain_of_an_unknown_option_names_the_nearest(name: str, fragment: str) -> None:
    with pytest.raises(LaunchError, match=fragment):
        config("explain", name)


def test_every_option_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for path in option_paths(Config):
        explain(".".join(path))
        assert capsys.readouterr().out.startswith(f"{'.'.join(path)}: ")


def test_schema_is_printed_as_json() -> None:
    schema: dict[str, Any] = json.loads(config("schema"))
    assert schema["$defs"]["TrainingConfig"]["properties"]["global_batch_size"]["exclusiveMinimum"] == 0
