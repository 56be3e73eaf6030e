"""What a user can hand to a conversion by mistake, or in malice: one sentence, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.conversion.huggingface import folder_lookup
from launch.conversion.huggingface.exporting import export_hugging_face
from launch.conversion.huggingface.importing import import_hugging_face, plan_import
from launch.errors import USER_ERRORS
from tests.helpers.hub_models import HUB_MODELS
from tests.helpers.saving import forge
from tests.unit.megalite.checkpoint.huggingface.test_weight_file_reader import Malicious, as_pickles

LLAMA = HUB_MODELS[0]


def _change_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def _change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _infect(folder: Path) -> None:
    tensors = as_pickles(folder)
    torch.save({**tensors, "evil": Malicious(folder / "executed")}, folder / "pytorch_model.bin")


def _import(folder: Path) -> None:
    import_hugging_face(folder / "hf", folder / "out")


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def _run(folder: Path) -> Path:
    (folder / "run" / "checkpoints" / "step_00000000").symlink_to(folder / "checkpoint")
    return folder / "run"


Attempt = Callable[[Path], object]
NORM = "model.norm.weight"
BAD: list[tuple[str, Attempt, str]] = [
    ("no such folder", lambda t: import_hugging_face(t / "none", t / "out"), "no such folder"),
    ("not a folder of theirs", lambda t: import_hugging_face(t, t / "out"), r"no config\.json"),
    ("an adapter", lambda t: (_adapter(t / "lora"), import_hugging_face(t / "lora", t / "out")), "merge it into its"),
    ("a checkpoint of ours", lambda t: import_hugging_face(t / "checkpoint", t / "out"), "`megalite export` makes one"),
    ("a run of ours", lambda t: import_hugging_face(_run(t), t / "out"), "training.initialize_from takes it as it is"),
    ("unknown family", lambda t: (_change_config(t / "hf", model_type="mamba"), _import(t)), "mamba"),
    ("unread key", lambda t: (_change_config(t / "hf", logit_scale=2.0), _import(t)), "logit_scale"),
    ("unknown activation", lambda t: (_change_config(t / "hf", hidden_act="swish9"), _import(t)), "hidden_act"),
    ("size is text", lambda t: (_change_config(t / "hf", hidden_size="big"), _import(t)), "hidden_size"),
    ("other size", lambda t: (_change_config(t / "hf", intermediate_size=102), _import(t)), r"\[101, 48\]"),
    ("more layers", lambda t: (_change_config(t / "hf", num_hidden_layers=4), _import(t)), "has no tensor model.lay"),
    ("fewer layers", lambda t: (_change_config(t / "hf", num_hidden_layers=2), _import(t)), "has tensor model.lay"),
    (
        "endless layers",
        lambda t: (_change_config(t / "hf", num_hidden_layers=10**9), _import(t)),
        "num_hidden_layers 1000000000",
    ),
    ("heads", lambda t: (_change_config(t / "hf", num_key_value_heads=3), _import(t)), "num_key_value_heads"),
    ("tensor missing", lambda t: (_change_weights(t / "hf", lambda w: w.pop(NORM)), _import(t)), NORM),
    ("extra", lambda t: (_change_weights(t / "hf", lambda w: w.update(x=torch.ones(2))), _import(t)), "tensor x,"),
    ("int8", lambda t: (_change_weights(t / "hf", lambda w: w.update({NORM: w[NORM].char()})), _import(t)), "as I8"),
    ("malicious pickle", lambda t: (_infect(t / "hf"), _import(t)), "none of its code was run"),
    ("target is there", lambda t: import_hugging_face(t / "hf", t / "checkpoint"), "not empty"),
    ("other kind", lambda t: import_hugging_face(t / "hf", t / "hf", overwrite=True), r"has no manifest\.json"),
    ("import into a file", lambda t: import_hugging_face(t / "hf", t / "hf/config.json/x"), "config.json: is a file"),
    ("name of a run's step", lambda t: import_hugging_face(t / "hf", t / "step_00000003"), "of that step"),
    ("import dtype", lambda t: import_hugging_face(t / "hf", t / "out", dtype="int8"), "fp32, bf16, fp16"),
    (
        "export into a file",
        lambda t: export_hugging_face(t / "checkpoint", t / "hf/config.json/x"),
        "config.json: is a file",
    ),
    ("export of nothing", lambda t: export_hugging_face(t / "none", t / "out"), "no such checkpoint"),
    ("export of another folder", lambda t: export_hugging_face(t / "hf", t / "out"), "is a Hugging Face folder"),
    ("export over a folder", lambda t: export_hugging_face(t / "checkpoint", t / "hf"), "not empty"),
    ("over another kind", lambda t: export_hugging_face(t / "checkpoint", t / "checkpoint", overwrite=True), "config"),
    ("dtype", lambda t: export_hugging_face(t / "checkpoint", t / "out", dtype="int8"), "fp32, bf16, fp16"),
    (
        "dtype of a forged manifest",
        lambda t: (
            forge(t / "checkpoint", '"dtype": "fp32"', '"dtype": "q4"'),
            export_hugging_face(t / "checkpoint", t / "out"),
        ),
        "fp32, bf16, fp16",
    ),
    ("a hub id that cannot be had", lambda t: import_hugging_face("no-such/model", t / "out"), "the hub did not give"),
    ("dry run of one", lambda t: plan_import("no-such/model", t / "out"), "the hub did not give it"),
    (
        "dry run",
        lambda t: (_change_config(t / "hf", hidden_size="big"), plan_import(t / "hf", t / "out")),
        "hidden_size",
    ),
]


@pytest.mark.parametrize(("attempt", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_one_sentence_and_writes_nothing(
    tmp_path: Path, attempt: Attempt, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no route to host\nmore about it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    import_hugging_face(LLAMA.save(tmp_path / "hf"), tmp_path / "checkpoint", validate=False)
    (tmp_path / "lora").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(USER_ERRORS, match=says) as caught:
        attempt(tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "hf" / "executed").exists()
    assert sorted(tmp_path.iterdir()) == before


def test_a_hub_ids_files_are_asked_for_and_pickles_only_where_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is played by a folder; a dry run asks for no weights."""
    stored, cache = LLAMA.save(tmp_path / "stored", torch.bfloat16), tmp_path / "cache"
    as_bin = LLAMA.save(tmp_path / "as bin")
    as_pickles(as_bin)
    for folder in (stored, as_bin):
        for name in ("original/params.json", "consolidated.safetensors", "README.md", "tokenizer.model", "x.onnx"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("{}")

    def download(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        from huggingface_hub.utils import filter_repo_objects

        source = stored if hub_id == "some/model" else as_bin
        target = cache / hub_id
        names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((source / name).read_bytes())
        return str(target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    small = ["config.json", "generation_config.json", "tokenizer.model"]
    plan = plan_import("some/model", tmp_path / "checkpoint")
    assert sorted(path.name for path in (cache / "some/model").iterdir()) == small
    assert (
        plan.parameters == LLAMA.build().num_parameters()
        and plan.bytes_read == 2 * plan.parameters
        and "not looked at" in plan.notices[0]
    )
    import_hugging_face("some/model", tmp_path / "checkpoint", validate=False)
    assert sorted(path.name for path in (cache / "some/model").iterdir()) == [*small[:2], "model.safetensors", small[2]]
    summary = import_hugging_face("old/model", tmp_path / "from bin", validate=False)
    assert (cache / "old/model" / "pytorch_model.bin").is_file() and ".bin pickles" in summary.notices[0]
    assert folder_lookup.is_hub_id("some/model") and not folder_lookup.is_hub_id(stored)
