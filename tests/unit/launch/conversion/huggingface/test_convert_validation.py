"""A conversion that changes the model is noticed by its logits, named by its first layer, and leaves nothing behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models.families
from data_pipeline.tokenizers.training import train_tokenizer
from launch.conversion.huggingface import validation
from launch.conversion.huggingface.exporting import export_hugging_face
from launch.conversion.huggingface.importing import import_hugging_face
from launch.conversion.huggingface.model_folder import open_model_folder
from launch.conversion.huggingface.validation import layers_of_every_kind, model_pair
from launch.errors import USER_ERRORS
from launch.reference.logits import ModelPair
from launch.reference.probes import probes, wanted_length
from megalite.config import ModelConfig
from models.families import model_config
from tests.helpers.hub_models import HUB_MODELS, YARN, HubModel

MODELS = {model.name: model for model in HUB_MODELS}
LLAMA = MODELS["llama"]


def _model(hub_model: HubModel) -> ModelConfig:
    return ModelConfig.model_validate(model_config(hub_model.config().to_diff_dict()))


def _swap_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in a name map that keeps every name and shape right."""
    wrong = replace(
        models.families.FAMILIES["llama"], renamed={"mlp.gate_proj": "mlp.up_proj", "mlp.up_proj": "mlp.gate_proj"}
    )
    monkeypatch.setitem(models.families.FAMILIES, "llama", wrong)


def test_a_wrong_conversion_is_noticed_by_its_logits_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LLAMA.save(tmp_path / "hf")
    import_hugging_face(original, tmp_path / "good", validate=False)
    _swap_gate_and_up(monkeypatch)
    before = sorted(tmp_path.iterdir())
    says = r"of their spread apart on .*, and model\.layers\.0 is the first layer that differs: .* nothing was written$"
    with pytest.raises(USER_ERRORS, match=says):
        import_hugging_face(original, tmp_path / "bad")
    with pytest.raises(USER_ERRORS, match=says):
        export_hugging_face(tmp_path / "good", tmp_path / "bad")
    assert sorted(tmp_path.iterdir()) == before
    assert import_hugging_face(original, tmp_path / "bad", validate=False).logit_difference is None


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2", "olmo2"])
def test_the_first_layer_that_differs_is_named(tmp_path: Path, name: str) -> None:
    """One weight of ours is changed at a time; before that layer nothing differs."""
    folder = open_model_folder(MODELS[name].save(tmp_path / "hf"))
    owners = {
        "model.embed_tokens.weight": "model.embed_tokens",
        "model.layers.1.self_attn.v_proj.weight": "model.layers.1",
        "model.layers.2.mlp.down_proj.weight": "model.layers.2",
        "model.norm.weight": "model.norm",
    }
    if "model.embed_positions.weight" in folder.shapes:
        owners["model.embed_positions.weight"] = "model.embed_tokens"  # transformers adds them before its first block
    if "lm_head.weight" in folder.shapes:
        owners["lm_head.weight"] = "lm_head"
    for spoilt, layer in owners.items():

        def read(name: str, source: Any, spoilt: str = spoilt) -> torch.Tensor:
            return folder.read(name, source).roll(1 if name == spoilt else 0, -1)

        pair = model_pair(folder.model, read, folder.files.folder)
        for probe in probes(folder.model, 30, None):
            if spoilt == "model.embed_tokens.weight" and folder.model.tie_word_embeddings:
                assert pair.difference(probe) > 1e-2
            assert pair.first_different_layer(probe, 1e-4) == layer, probe.name


def test_the_right_weights_differ_in_no_layer(tmp_path: Path) -> None:
    folder = open_model_folder(MODELS["gemma2"].save(tmp_path / "hf"))
    pair = model_pair(folder.model, folder.read, folder.files.folder)
    for probe in probes(folder.model, 40, None):
        assert pair.first_different_layer(probe, 1e-4) == "lm_head"
        assert pair.difference(probe) < 5e-5 and pair.rounding(probe) < 5e-5


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rounding_is_no_wrong_conversion_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Beyond the tolerance transformers is compared with itself: by its two attentions, or (Gemma 2) in fp64."""
    monkeypatch.setattr(validation, "LOGITS_TOLERANCE", 1e-9)
    monkeypatch.setattr(validation, "ROUNDING_FACTOR", 20)  # of so small a model chance has more than a tenth
    summary = import_hugging_face(MODELS[name].save(tmp_path / "hf"), tmp_path / "checkpoint")
    assert summary.logit_difference is not None and 1e-9 < summary.logit_difference < 5e-5
    assert any("rounding, by which transformers differs from itself" in notice for notice in summary.notices)


def test_real_text_is_compared_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(
        ["def f(x): return x\n" * 50 + "".join(map(chr, range(32, 127)))], tmp_path / "tok", 270
    )
    folder = HubModel("", "llama", {"vocab_size": 270}).save(tmp_path / "hf")
    for path in tokenizer.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    imported = import_hugging_face(folder, tmp_path / "checkpoint")
    exported = export_hugging_face(tmp_path / "checkpoint", tmp_path / "out")
    for summary in (imported, exported):
        assert "real text (1 x 128)" in summary.compared and not summary.notices
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()

    (folder / "tokenizer.json").write_text("{}")
    spoilt = import_hugging_face(folder, tmp_path / "other")
    assert any("no real text was compared" in notice for notice in spoilt.notices) and len(spoilt.compared) == 4


def test_lengths_go_beyond_the_window_and_the_rotary_scaling() -> None:
    yarn = {**YARN, "original_max_position_embeddings": 400}
    assert wanted_length(_model(HubModel("", "llama", {"rope_scaling": yarn, "max_position_embeddings": 1600}))) > 400
    assert wanted_length(_model(HubModel("", "mistral", {"sliding_window": 300}))) > 300
    assert wanted_length(_model(MODELS["gpt2"])) == 64  # it has learned no more positions


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a token took a second in all layers, and none in the first two."""
    measured = ModelPair.seconds_per_token
    monkeypatch.setattr(
        ModelPair, "seconds_per_token", lambda pair: 1.0 if pair.ours.model.num_hidden_layers > 2 else measured(pair)
    )
    yield


def test_where_long_rows_take_too_long_the_first_layers_read_them(tmp_path: Path, little_time: None) -> None:
    hub_model = HubModel("", "mistral", {"sliding_window": 200})
    summary = import_hugging_face(hub_model.save(tmp_path / "hf"), tmp_path / "checkpoint")
    assert "random tokens (2 x 16)" in summary.compared
    assert "random tokens (2 x 232) in the first 2 layers" in summary.compared and not summary.notices


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "smollm3", "qwen3_moe-some-dense", "gpt2", "phi4-mini"])
def test_a_model_too_large_for_the_memory_is_compared_by_its_first_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Config.json and its lists of layers are shortened."""
    hub_model = replace(MODELS[name], switches=MODELS[name].switches | {"num_hidden_layers": 6})
    first = layers_of_every_kind(_model(hub_model))
    sizes = [validation._memory(_model(replace(hub_model, switches=hub_model.switches | {"num_hidden_layers": count})))
             for count in (first, 6)]  # fmt: skip
    monkeypatch.setattr(validation, "_free_memory", lambda: sizes[0] + sizes[1])
    summary = import_hugging_face(hub_model.save(tmp_path / "hf"), tmp_path / "checkpoint")
    assert summary.logit_difference is not None and summary.logit_difference < 5e-5
    assert any(f"of 6 layers only the first {first} were compared" in notice for notice in summary.notices)
    assert all(what.endswith(f"in the first {first} layers") for what in summary.compared)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]
    assert all(path.is_file() for path in (tmp_path / "checkpoint").iterdir())

    monkeypatch.setattr(validation, "_free_memory", lambda: sizes[0])
    with pytest.raises(USER_ERRORS, match="--no-validate"):
        export_hugging_face(tmp_path / "checkpoint", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]


def test_the_first_layers_have_every_kind(tmp_path: Path) -> None:
    kinds = {"llama": 2, "gemma3": 3, "smollm3": 3, "qwen3_moe-some-dense": 2, "olmo3": 4}
    assert {name: layers_of_every_kind(_model(MODELS[name])) for name in kinds} == kinds
    one = HubModel("", "llama", {"num_hidden_layers": 1})
    assert layers_of_every_kind(_model(one)) == 1


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_strange_numbers_are_named_and_only_converted_unvalidated(tmp_path: Path, number: float) -> None:
    folder = LLAMA.save(tmp_path / "hf")
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 5] = number
    save_file(tensors, path)
    with pytest.raises(USER_ERRORS, match=f"{name} holds NaN or infinite numbers.*nothing was written"):
        import_hugging_face(folder, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    summary = import_hugging_face(folder, tmp_path / "checkpoint", validate=False)
    assert any(f"{name} holds NaN or infinite" in notice for notice in summary.notices)
    with pytest.raises(USER_ERRORS, match="holds NaN or infinite numbers"):
        export_hugging_face(tmp_path / "checkpoint", tmp_path / "out")


def test_a_number_too_large_for_fp16_is_named(tmp_path: Path) -> None:
    folder = LLAMA.save(tmp_path / "hf")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][0, 0] = 1e6
    save_file(tensors, path)
    import_hugging_face(folder, tmp_path / "checkpoint", validate=False)
    with pytest.raises(
        USER_ERRORS, match=r"in fp16 lm_head\.weight holds 1e\+06, which is too large for float16: take"
    ):
        export_hugging_face(tmp_path / "checkpoint", tmp_path / "out", dtype="fp16")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert export_hugging_face(tmp_path / "checkpoint", tmp_path / "out", validate=False).dtype == "fp32"


def test_sums_that_overflow_are_no_strange_numbers(tmp_path: Path) -> None:
    """The quick look at a block is its sum, which in fp16 overflows at 65504."""
    folder = LLAMA.save(tmp_path / "hf")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"].fill_(1000.0)
    save_file(tensors, path)
    import_hugging_face(folder, tmp_path / "checkpoint", validate=False)
    summary = export_hugging_face(tmp_path / "checkpoint", tmp_path / "out", dtype="fp16", validate=False)
    assert not any("NaN" in notice for notice in summary.notices)
