"""Hugging Face -> checkpoint -> any layout -> Hugging Face: the same numbers, or one sentence and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import models.families
from data_pipeline.tokenizer import inspect_tokenizer, train_tokenizer
from launch.convert import export_hugging_face, global_shapes, import_hugging_face
from launch.errors import USER_ERRORS
from launch.generate import generate
from megalite.checkpoint.engine import load_engine
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.writer import write_single
from megalite.config import Config, ModelConfig
from megalite.engine.engine import build_engine
from megalite.parallel.loss import head_logits
from models.decoder import decoder_layers
from models.families import model_config
from tests.checkpoint.saving import forge
from tests.engine.cases import Batch
from tests.models.hub_models import HUB_MODELS, HubModel
from tests.ranks import run_ranks

LLAMA, TIED, STARCODER2 = HUB_MODELS[0], HUB_MODELS[1], HUB_MODELS[6]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _config(folder: Path) -> dict[str, Any]:
    return transformers.AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": ""}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_import_and_export_give_back_every_bit(tmp_path: Path, hub_model: HubModel, dtype: torch.dtype) -> None:
    original = hub_model.save(tmp_path / "original", dtype, max_shard_size="60KB")
    imported = import_hugging_face(original, tmp_path / "checkpoint")
    exported = export_hugging_face(tmp_path / "checkpoint", tmp_path / "exported")
    assert imported.logit_difference is not None and imported.logit_difference <= 1e-5
    assert exported.logit_difference is not None and exported.logit_difference <= 1e-5
    before, after = _weights(original), _weights(tmp_path / "exported")
    assert before.keys() == after.keys() and exported.tensors == len(after)
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(after[name], tensor), name
    assert _config(original) == _config(tmp_path / "exported")
    generation = [
        json.loads((folder / "generation_config.json").read_text()) for folder in (original, tmp_path / "exported")
    ]
    assert generation[0] == generation[1]


def _logits_on_rank(rank: int, checkpoint: str, tp: int, pp: int, tokens: np.ndarray) -> np.ndarray | None:
    """Logits of the real engine with the checkpoint's weights, where the last stage computes them."""
    reader = CheckpointReader(Path(checkpoint))
    config = Config.model_validate(
        {
            "run_dir": "unused",
            "model": reader.manifest.config["model"],
            "data": {"path": "unused"},
            "parallel": {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": 1},
            "precision": {"dtype": "fp32"},
            "training": {
                "global_batch_size": len(tokens),
                "micro_batch_size": len(tokens),
                "sequence_length": tokens.shape[1],
                "steps": 1,
            },
        }
    )
    engine = build_engine(decoder_layers(config.model), config, config.check_world(tp * pp, "cpu"))
    load_engine(engine, reader, weights_only=True)
    seen: list[torch.Tensor] = []
    module = engine.deepspeed.module
    loss = module._loss

    def watched(outputs: Any, labels: Any, group: Any) -> torch.Tensor:
        seen.append(head_logits(*outputs, config.model.vocab_size, group))
        return loss(outputs, labels, group)

    module._loss = watched
    engine.evaluate([Batch(tokens, tokens, None, np.arange(len(tokens)))] if engine.needs_data else [], 1)
    return seen[0].numpy() if seen else None


@pytest.mark.parametrize(
    ("tp", "pp", "hub_model"),
    [(2, 1, STARCODER2), (1, 2, TIED), (2, 2, TIED), (2, 2, STARCODER2), (2, 2, HUB_MODELS[2])],
    ids=str,
)
def test_an_imported_model_has_transformers_logits_on_any_layout(
    tmp_path: Path, tp: int, pp: int, hub_model: HubModel
) -> None:
    """Catches a cut of fused weights, biases or an odd vocabulary that only several ranks see."""
    import_hugging_face(hub_model.save(tmp_path / "hf"), tmp_path / "checkpoint", validate=False)
    tokens = np.random.default_rng(0).integers(0, 131, (2, 17))
    results = run_ranks(_logits_on_rank, tp * pp, str(tmp_path / "checkpoint"), tp, pp, tokens)
    computed = [logits for logits in results if logits is not None]
    assert len(computed) == tp  # the ranks of the last stage
    with torch.no_grad():
        expected = hub_model.build()(torch.from_numpy(tokens)).logits.numpy()
    for logits in computed:
        assert np.abs(logits - expected).max() <= 1e-5 * expected.std()


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
    import_hugging_face(original, tmp_path / "good")
    _swap_gate_and_up(monkeypatch)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(USER_ERRORS, match="of their spread apart"):
        import_hugging_face(original, tmp_path / "bad")
    with pytest.raises(USER_ERRORS, match="of their spread apart"):
        export_hugging_face(tmp_path / "good", tmp_path / "bad")
    assert sorted(tmp_path.iterdir()) == before
    assert import_hugging_face(original, tmp_path / "bad", validate=False).logit_difference is None


def test_rounding_in_a_deep_model_is_no_wrong_conversion(tmp_path: Path) -> None:
    """64 layers of large weights amplify rounding beyond 1e-5, and as far between transformers' own two attentions."""
    deep = HubModel("deep", "llama", {"num_hidden_layers": 64})
    assert import_hugging_face(deep.save(tmp_path / "hf"), tmp_path / "checkpoint").logit_difference is not None


def test_a_run_of_ours_exports_with_its_tokenizer_and_generates(tmp_path: Path) -> None:
    """The newest checkpoint of a run folder, in the run's precision, stopping at the tokenizer's end token."""
    tokenizer = train_tokenizer(
        ["def f(x): return x\n" * 50 + "".join(map(chr, range(32, 127)))], tmp_path / "tok", 270
    )
    model = ModelConfig(
        vocab_size=270, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in global_shapes(model).items()}
    config = {"model": model.model_dump(mode="json"), "precision": {"dtype": "bf16"}}
    for step in (10, 20):
        write_single(
            tmp_path / "run" / "checkpoints" / f"step_{step:08d}",
            [(name, tensor + step) for name, tensor in tensors.items()] if step == 10 else tensors.items(),
            step=step, config=config, tokenizer=str(tokenizer), state={},
        )  # fmt: skip
    summary = export_hugging_face(tmp_path / "run", tmp_path / "hf")
    assert summary.dtype == "bf16" and not summary.notices and summary.logit_difference is not None
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(value, tensors[name].bfloat16()) for name, value in loaded.state_dict().items())
    assert loaded.generation_config.eos_token_id == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("def f").input_ids

    in_fp32 = export_hugging_face(tmp_path / "run", tmp_path / "hf", dtype="fp32", overwrite=True)
    assert in_fp32.dtype == "fp32" and _weights(tmp_path / "hf")["model.norm.weight"].dtype == torch.float32

    greedy = generate(tmp_path / "run", "def f", max_new_tokens=8)
    assert greedy.prompt == "def f" and 1 <= greedy.new_tokens <= 8
    assert greedy == generate(tmp_path / "run" / "checkpoints" / "step_00000020", "def f", max_new_tokens=8, seed=5)
    drawn = [
        generate(tmp_path / "hf", "", max_new_tokens=8, temperature=2.0, top_k=50, seed=seed) for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_dropout_changes_nothing_about_an_export(tmp_path: Path) -> None:
    """The comparison of logits is an evaluation: in training mode it would find two different models."""
    run = _run_checkpoint(tmp_path / "run", LLAMA, dropout={"attention_dropout": 0.3, "embedding_dropout": 0.3})
    difference = export_hugging_face(run, tmp_path / "hf").logit_difference
    assert difference is not None and difference <= 1e-5


def _run_checkpoint(folder: Path, hub_model: HubModel, **manifest: Any) -> Path:
    """The checkpoint of a run on this model, random weights."""
    options = model_config(hub_model.build().config.to_dict()) | manifest.pop("dropout", {})
    model = ModelConfig.model_validate(options)
    tensors = ((name, 0.2 * torch.randn(shape)) for name, shape in global_shapes(model).items())
    config = {"model": model.model_dump(mode="json"), "precision": {"dtype": "fp32"}} | manifest.pop("config", {})
    write_single(folder, tensors, step=3, config=config, state={}, **({"tokenizer": None} | manifest))
    return folder


def test_a_run_that_started_from_an_import_exports_its_token_ids(tmp_path: Path) -> None:
    """Training copies `hugging_face` of the imported checkpoint; everything else is the run's own."""
    ids = {"bos_token_id": 5, "eos_token_id": [7, 8], "pad_token_id": 9}
    kept = {"config": ids, "generation_config": ids | {"temperature": 0.5, "do_sample": True}, "dtype": "bf16"}
    run = _run_checkpoint(tmp_path / "run", LLAMA, config={"hugging_face": kept})
    summary = export_hugging_face(run, tmp_path / "hf", validate=False)
    assert summary.dtype == "bf16"
    config, generation = (
        json.loads((tmp_path / "hf" / f"{n}.json").read_text()) for n in ("config", "generation_config")
    )
    assert {key: config[key] for key in ids} == ids
    assert generation.items() >= kept["generation_config"].items()


def test_a_tokenizer_retrained_since_is_not_exported(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["abc " * 9], tmp_path / "tok", 258)
    run = _run_checkpoint(tmp_path / "run", LLAMA, tokenizer=str(tokenizer))
    digest = inspect_tokenizer(tokenizer).sha256
    forge(run, '"tokenizer_sha256": null', f'"tokenizer_sha256": "{digest}"')
    assert not export_hugging_face(run, tmp_path / "same", validate=False).notices
    train_tokenizer(["xyz " * 9], tokenizer, 258)
    with pytest.raises(USER_ERRORS, match=r"retrained or replaced since: give the old one back$"):
        export_hugging_face(run, tmp_path / "other", validate=False)
    assert not (tmp_path / "other").exists()


def test_greedy_text_is_transformers_own(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["abc " * 99 + "".join(map(chr, range(32, 127)))], tmp_path / "tok", 260)
    model = HubModel("", "llama", {"vocab_size": 260, "bos_token_id": 0, "eos_token_id": 0})
    folder = model.save(tmp_path / "hf")
    for path in tokenizer.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)("abc a").input_ids])
    theirs = model.build().generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    ours = generate(folder, "abc a", max_new_tokens=6)
    expected = transformers.AutoTokenizer.from_pretrained(folder).decode(theirs, skip_special_tokens=True)
    assert ours.completion == expected and ours.text == "abc a" + expected
    import_hugging_face(folder, tmp_path / "checkpoint")
    assert generate(tmp_path / "checkpoint", "abc a", max_new_tokens=6) == ours


def _change_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def _drop_norm(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "model.norm.weight"}, path)


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("no such folder", lambda t: import_hugging_face(t / "none", t / "out"), "no such folder"),
    ("not a folder of theirs", lambda t: import_hugging_face(t, t / "out"), "no config.json"),
    ("unknown family", lambda t: (_change_config(t / "hf", model_type="mamba"), _import(t)), "mamba"),
    ("unread key", lambda t: (_change_config(t / "hf", logit_scale=2.0), _import(t)), "logit_scale"),
    ("unknown activation", lambda t: (_change_config(t / "hf", hidden_act="relu"), _import(t)), "hidden_act"),
    ("size is text", lambda t: (_change_config(t / "hf", hidden_size="big"), _import(t)), "hidden_size"),
    ("other size", lambda t: (_change_config(t / "hf", intermediate_size=102), _import(t)), r"\[101, 48\]"),
    (
        "heads do not fit",
        lambda t: (_change_config(t / "hf", num_key_value_heads=3), _import(t)),
        "num_key_value_heads",
    ),
    ("tensor missing", lambda t: (_drop_norm(t / "hf"), _import(t)), "model.norm.weight"),
    ("target is there", lambda t: import_hugging_face(t / "hf", t / "hf"), "not empty"),
    ("import into a file", lambda t: import_hugging_face(t / "hf", t / "hf/config.json/x"), "cannot be written"),
    ("export into a file", lambda t: export_hugging_face(t / "checkpoint", t / "hf/config.json/x"), "be written"),
    ("export of nothing", lambda t: export_hugging_face(t / "none", t / "out"), "no such checkpoint"),
    ("export of another folder", lambda t: export_hugging_face(t / "hf", t / "out"), "not a complete checkpoint"),
    ("export over a folder", lambda t: export_hugging_face(t / "checkpoint", t / "hf"), "not empty"),
    ("dtype", lambda t: export_hugging_face(t / "checkpoint", t / "out", dtype="int8"), "fp32, bf16, fp16"),
    ("generate from nothing", lambda t: generate(t / "none", "a"), "no such checkpoint"),
    ("no tokenizer in a folder", lambda t: generate(t / "hf", "a"), "tokenizer"),
    ("no tokenizer in a checkpoint", lambda t: generate(t / "checkpoint", "a"), "knows no tokenizer"),
    ("temperature", lambda t: generate(t / "hf", "a", temperature=-1.0), "temperature"),
]


def _import(folder: Path) -> None:
    import_hugging_face(folder / "hf", folder / "out")


@pytest.mark.parametrize(("attempt", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_one_sentence_and_writes_nothing(
    tmp_path: Path, attempt: Callable[[Path], object], says: str
) -> None:
    import_hugging_face(LLAMA.save(tmp_path / "hf"), tmp_path / "checkpoint", validate=False)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(USER_ERRORS, match=says) as caught:
        attempt(tmp_path)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
