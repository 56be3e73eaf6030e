"""Exports of adapters: what the folder says about the model that they belong to."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.conversion.huggingface.exporting import export_hugging_face, plan_export
from launch.conversion.huggingface.model_folder import open_model_folder
from launch.inference.stored_model import open_stored
from launch.trainer.data.opening import open_data
from launch.trainer.start.resume import Start, find_start
from launch.trainer.start.run_config import checkpoint_at
from megalite.checkpoint.errors import CheckpointError
from megalite.config import Config
from tests.conftest import VOCAB_SIZE
from tests.helpers.hub_models import HubModel
from tests.helpers.single_rank import write_single

LORA = {"name": "lora", "rank": 2, "alpha": 3.0, "targets": ["q_proj"]}


def _saved(config: Config, start: Start, model: Path, step: int) -> Path:
    """A checkpoint of the run, as its rank 0 describes it, with adapters beside the queries."""
    hub, tensors = open_model_folder(model), {}
    for name, shape in hub.shapes.items():
        tensors[name] = hub.read(name, tuple(slice(0, n) for n in shape))
        if name.endswith("q_proj.weight"):
            layer = name.removesuffix(".weight")
            tensors |= {f"{layer}.lora_A": torch.randn(2, shape[1]), f"{layer}.lora_B": torch.randn(shape[0], 2)}
    folder = config.run_dir / "checkpoints" / f"step_{step:08d}"
    state = {"data_fingerprint": open_data(config).training.fingerprint, "seed": 0}
    described = config.model_dump(mode="json") | start.inherited
    write_single(folder, tensors.items(), step=step, config=described, tokenizer=None, state=state)
    return folder


def _named_by(checkpoint: Path, folder: Path) -> str | None:
    export_hugging_face(checkpoint, folder, validate=False)
    named: str | None = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    return named


def test_the_base_model_is_the_one_that_the_run_began_with(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies under a relative path where somebody exports, and whatever a resume's config says: peft would put
    the adapters on a stranger's model without a word."""
    (tmp_path / "here" / "models").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = HubModel("", "llama", {"vocab_size": VOCAB_SIZE}).save(Path("models/small").absolute())
    tiny |= {"model": open_model_folder(model).model.model_dump(mode="json"), "adapter": LORA}
    tiny["training"]["initialize_from"] = "models/small"
    config = Config.model_validate(tiny)
    start = find_start(config, open_data(config), None, ())
    first = _saved(config, start, model, 1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _named_by(first, tmp_path / "first") == str(model)
    summary = export_hugging_face(first, tmp_path / "again")
    for opens in (open_stored, checkpoint_at):
        with pytest.raises(CheckpointError, match=r"again: is an adapter, not a model: merge it .* of the run"):
            opens(tmp_path / "again")
    assert any(f"on top of {model}, which base_model_name_or_path" in notice for notice in summary.notices)
    assert summary.compared == ("digests of the checkpoint's files",) and summary.logit_difference is None

    tiny["training"]["initialize_from"] = "some/other"
    config = Config.model_validate(tiny)
    start = find_start(config, open_data(config), first, ())
    second = _saved(config, start, model, 2)
    assert start.is_resume and _named_by(second, tmp_path / "second") == str(model)

    tiny["training"]["initialize_from"] = str(second)  # whose merged weights are no Hugging Face model's
    config = Config.model_validate(tiny | {"run_dir": str(tmp_path / "next")})
    start = find_start(config, open_data(config), None, ())
    third = _saved(config, start, model, 1)
    assert _named_by(third, tmp_path / "third") is None
    summary = export_hugging_face(third, tmp_path / "again", validate=False, overwrite=True)
    assert any("in no Hugging Face folder: name one in adapter_config.json" in notice for notice in summary.notices)


def test_an_export_ends_where_answers_end(tiny: dict[str, Any], tmp_path: Path, corpus: Path) -> None:
    """transformers and servers would write the token that ends a turn again and again: they look at no template."""
    model = HubModel("", "llama", {"vocab_size": VOCAB_SIZE, "eos_token_id": 3}).save(tmp_path / "base")
    tiny |= {"model": open_model_folder(model).model.model_dump(mode="json"), "adapter": LORA}
    tiny["training"]["initialize_from"] = str(model)
    config = Config.model_validate(tiny)
    began = find_start(config, open_data(config), None, ())
    first = _saved(config, replace(began, ends_of_turns=(7, None)), model, 1)
    (tmp_path / "tok").mkdir()
    for path in (corpus.parent / "tokenizer").iterdir():
        shutil.copy(path, tmp_path / "tok")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (tmp_path / "tok/chat_template.jinja").write_text(template)
    plan = plan_export(first, tmp_path / "merged", tokenizer=tmp_path / "tok", merge=True)
    assert len(plan.notices) == 1 and "ignores add_generation_prompt" in plan.notices[0]
    summary = export_hugging_face(first, tmp_path / "merged", validate=False, merge=True)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "merged" / name).read_text())["eos_token_id"] == [7, 3]
    summary = export_hugging_face(first, tmp_path / "adapter", validate=False)
    stops = json.loads((tmp_path / "adapter" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [7, 3] and any("give generate eos_token_id=[7, 3]" in notice for notice in summary.notices)

    later = replace(began, hub=None, manifest=open_stored(first).manifest, ends_of_turns=(9,))  # on other conversations
    assert later.inherited["ends_of_turns"] == [9, 7, None]


def test_an_export_ends_where_the_documents_of_its_text_end(tiny: dict[str, Any], tmp_path: Path, corpus: Path) -> None:
    """A model that went on with another end token than its config.json names would be asked on and on behind it."""
    model = HubModel("", "llama", {"vocab_size": VOCAB_SIZE, "eos_token_id": 3}).save(tmp_path / "base")
    tiny |= {"model": open_model_folder(model).model.model_dump(mode="json"), "adapter": LORA}
    tiny["training"]["initialize_from"] = str(model)
    config = Config.model_validate(tiny)
    end = json.loads(Path(f"{corpus}.meta.json").read_text())["eos_token_id"]
    saved = _saved(config, find_start(config, open_data(config), None, ()), model, 1)
    export_hugging_face(saved, tmp_path / "merged", validate=False, merge=True)
    export_hugging_face(saved, tmp_path / "adapter", validate=False)
    for name in ("merged/config.json", "merged/generation_config.json", "adapter/generation_config.json"):
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == [end, 3]
