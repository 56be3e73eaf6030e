"""A run keeps its tokenizer from its first step, and goes on with no other."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.tokenizers.reading import inspect_tokenizer
from data_pipeline.tokenizers.training import train_tokenizer
from launch.errors import LaunchError
from launch.trainer.data.opening import open_data
from launch.trainer.run_tokenizer import keep_tokenizer, tokenizer_in_manifests
from launch.trainer.start.checks import position_without_lock
from launch.trainer.start.flags import NO_FLAGS
from launch.trainer.start.resume import Start, checkpoints_of, find_start
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import MANIFEST, find_latest, read_manifest
from megalite.config import Config
from tests.unit.launch.cli.test_mistakes import own_checkpoint


@pytest.fixture
def config(tiny: dict[str, Any], corpus: Path, tmp_path: Path) -> Config:
    """A run on a copy of the corpus, whose tokenizer may be changed."""
    data = shutil.copytree(corpus.parent, tmp_path / "corpus")
    meta = data / "text.meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"tokenizer": str(data / "tokenizer")}))
    tiny["data"]["path"] = str(data / "text")
    return Config.model_validate(tiny)


def started(config: Config) -> Start:
    own, skipped = find_latest(checkpoints_of(config)) if checkpoints_of(config).exists() else (None, [])
    return find_start(config, open_data(config), own, skipped)


def kept(config: Config) -> dict[str, bytes]:
    """The run's copy, as its first step leaves it."""
    start = started(config)
    config.run_dir.mkdir(exist_ok=True)
    if start.tokenizer is not None:
        keep_tokenizer(config, start.tokenizer)
    return {path.name: path.read_bytes() for path in (config.run_dir / "model_tokenizer").glob("*")}


def saved(config: Config, folder: Path) -> Path:
    """The run's own checkpoint, with a manifest as its first session writes it."""
    sha256 = tokenizer_in_manifests(open_data(config), started(config).tokenizer)[1]
    own_checkpoint()(copy.deepcopy(config.model_dump(mode="json")) | {"data": {**as_given(config)}}, folder)
    step = checkpoints_of(config) / "step_00000002"
    manifest = read_manifest(step).model_copy(update={"tokenizer": "../../model_tokenizer", "tokenizer_sha256": sha256})
    (step / MANIFEST).write_bytes(manifest.sealed())
    return step


def as_given(config: Config) -> dict[str, Any]:
    return {"path": str(config.data.path[0]), "held_out_fraction": config.data.held_out_fraction}


def test_the_tokenizer_of_the_data_is_kept_whole(config: Config, tmp_path: Path) -> None:
    tokenizer = tmp_path / "corpus" / "tokenizer"
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert kept(config) == {name: (tokenizer / name).read_bytes() for name in names}
    times = {path: path.stat().st_mtime_ns for path in (config.run_dir / "model_tokenizer").iterdir()}
    kept(config)
    assert {path: path.stat().st_mtime_ns for path in times} == times, "written once"
    assert tokenizer_in_manifests(open_data(config), started(config).tokenizer)[0] == "../../model_tokenizer"
    shutil.rmtree(tokenizer)
    assert started(config).tokenizer == config.run_dir / "model_tokenizer", "a start before the first checkpoint"


def test_the_class_that_the_models_config_names_is_kept_too(config: Config, tmp_path: Path) -> None:
    """transformers reads the same files by other rules without it, and a checkpoint would not know its tokenizer."""
    source = tmp_path / "corpus" / "tokenizer"
    digits = {"type": "Digits", "individual_digits": True}
    rules = json.loads((source / "tokenizer.json").read_text())
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, rules["pre_tokenizer"]]}
    (source / "tokenizer.json").write_text(json.dumps(rules))
    (source / "tokenizer_config.json").write_text("{}")
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", "hidden_size": 64}))
    config.run_dir.mkdir()
    keep_tokenizer(config, source)
    copied = config.run_dir / "model_tokenizer"
    assert json.loads((copied / "config.json").read_text()) == {"model_type": "gpt2"}
    alone = inspect_tokenizer(shutil.copytree(copied, tmp_path / "alone", ignore=lambda *_: ["config.json"]))
    assert inspect_tokenizer(source).sha256 == inspect_tokenizer(copied).sha256 != alone.sha256


def test_files_beside_it_that_make_other_ids_are_noticed(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tokenizer.json is the same. Data of older versions stays usable: they read that file alone."""
    added = tmp_path / "corpus" / "tokenizer" / "added_tokens.json"
    added.write_text("{}")
    position_without_lock(config, NO_FLAGS)
    added.write_text(json.dumps({"import": config.model.vocab_size}))
    with pytest.raises(LaunchError, match=r"files beside its tokenizer.json make other ids"):
        position_without_lock(config, NO_FLAGS)
    meta = tmp_path / "corpus" / "text.meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"tokenizer_files": False}))
    position_without_lock(config, NO_FLAGS)
    assert "was prepared from the tokenizer.json of" in caplog.text


def test_a_resume_needs_only_the_kept_one(config: Config, tmp_path: Path) -> None:
    before = kept(config)
    saved(config, tmp_path)
    train_tokenizer(["abc " * 99], tmp_path / "corpus" / "tokenizer", 258, overwrite=True)
    assert kept(config) == before and started(config).step == 2
    shutil.rmtree(tmp_path / "corpus" / "tokenizer")
    assert kept(config) == before
    assert not [notice for notice in started(config).notices if "tokenizer" in notice]


def test_a_resume_with_another_one_in_its_place_is_refused(config: Config, tmp_path: Path) -> None:
    """Its checkpoints would export with words that are not the model's."""
    kept(config)
    step = saved(config, tmp_path)
    shutil.rmtree(config.run_dir / "model_tokenizer")
    train_tokenizer(["abc " * 99], config.run_dir / "model_tokenizer", 258)
    with pytest.raises(
        CheckpointError, match=rf"tokenizer.json is not the tokenizer that {step} was trained with"
    ) as e:
        started(config)
    assert "\n" not in str(e.value)


def test_a_run_of_an_older_version_keeps_it_from_its_next_session_on(config: Config, tmp_path: Path) -> None:
    before = kept(config)
    saved(config, tmp_path)
    shutil.rmtree(config.run_dir / "model_tokenizer")
    assert kept(config) == before


def test_a_start_on_other_data_does_not_replace_what_an_earlier_start_kept(config: Config, tmp_path: Path) -> None:
    """Though no checkpoint was saved with it, it may be the only copy."""
    config.run_dir.mkdir()
    train_tokenizer(["abc " * 99], tmp_path / "earlier", 258)
    keep_tokenizer(config, tmp_path / "earlier")
    with pytest.raises(CheckpointError, match=r"holds other files than the tokenizer .*corpus/tokenizer"):
        started(config)
    (config.run_dir / "model_tokenizer").rename(tmp_path / "aside")
    tokenizer = tmp_path / "corpus" / "tokenizer"
    assert kept(config)["tokenizer.json"] == (tokenizer / "tokenizer.json").read_bytes()


def test_what_a_user_adds_to_the_kept_one_stays(config: Config) -> None:
    before = kept(config)
    template = config.run_dir / "model_tokenizer" / "chat_template.jinja"
    template.write_text("{{ messages }}")
    assert kept(config) == before | {template.name: b"{{ messages }}"}


@pytest.mark.parametrize("damage", ["gone", "retrained", "a link"])
def test_a_run_without_one_says_so_and_trains(damage: str, config: Config, tmp_path: Path) -> None:
    tokenizer = tmp_path / "corpus" / "tokenizer"
    if damage == "gone":
        shutil.rmtree(tokenizer)
    elif damage == "retrained":
        train_tokenizer(["abc " * 99], tokenizer, 258, overwrite=True)
    else:
        (tokenizer / "vocab.json").symlink_to(tmp_path / "corpus" / "text.idx")
    start = started(config)
    assert start.tokenizer is None and len(start.notices) == 1
    assert start.notices[0].startswith("the run keeps no tokenizer, ") and "--tokenizer" in start.notices[0]
    assert tokenizer_in_manifests(open_data(config), None)[0] == str(tokenizer)
