"""Models known by name: their sizes are those of the published weights, and a name is as good as a config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.trainer.start.run_config import load_run_config
from megalite.config import ConfigError
from megalite.config.known_models import known_models, names_near, run_of
from megalite.planner.cost.stage_parameters import parameters
from tests.helpers.commands import command_line


@pytest.mark.parametrize("name", known_models())
def test_a_known_model_has_as_many_parameters_as_its_published_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong size, bias, tie or head would show; GPT-3's paper rounds to 175.0 billion."""
    monkeypatch.chdir(tmp_path)
    config, published = load_run_config(Path(name.upper())), known_models()[name]["parameters"]
    assert parameters(config.model) == pytest.approx(published, abs=0, rel=0.003 if name == "gpt3-175b" else 0)
    assert config.training.sequence_length <= config.model.max_position_embeddings
    assert config.batches.tokens_after(config.total_steps) == pytest.approx(config.training.tokens, rel=1e-3)


def test_a_file_of_that_name_counts_more_and_near_names_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_of("llama3") is None and "llama3-8b" in names_near("llama-3-8b")
    with pytest.raises(ConfigError, match=r"lama3-70b does not exist; .* did you mean llama3-70b or"):
        load_run_config(Path("lama3-70b"))
    with pytest.raises(ConfigError, match=r"did you mean llama3\.1-8b or"):
        load_run_config(Path("llama-3.1-8b"))
    with pytest.raises(ConfigError, match=r"gpt2\.yaml does not exist$"):
        load_run_config(Path("gpt2.yaml"))
    Path("gpt2").write_text("model: {}")
    with pytest.raises(ConfigError, match="gpt2: "):
        load_run_config(Path("gpt2"))


def test_a_plan_and_a_first_config_take_a_name(tmp_path: Path) -> None:
    """The config that is written is the one that was planned for."""
    where = ("--gpus", "8", "--accelerator", "H100")
    said = command_line("plan", "llama3.2-1b", *where, cwd=tmp_path).stdout
    assert "note: llama3.2-1b: 1,235,814,400 parameters (model card of Llama 3.2" in said
    command_line("config", "init", "--from", "llama3.2-1b", "-o", "own.yaml", cwd=tmp_path)
    asked = [command_line("plan", path, *where, "--json", cwd=tmp_path) for path in ("llama3.2-1b", "own.yaml")]
    named, own = (json.loads(each.stdout) for each in asked)
    assert named == own and named["layouts"]
