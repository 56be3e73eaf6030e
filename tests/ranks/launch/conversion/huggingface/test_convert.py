"""Hugging Face -> checkpoint -> any layout -> Hugging Face: the same numbers in every bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from data_pipeline.tokenizers.reading import inspect_tokenizer
from data_pipeline.tokenizers.training import train_tokenizer
from launch.conversion.huggingface.checkpoint_tokenizer import FILES_SHA256, KEPT, RECORDED
from launch.conversion.huggingface.exporting import export_hugging_face, plan_export
from launch.conversion.huggingface.importing import import_hugging_face, plan_import
from launch.conversion.huggingface.serial_model import global_shapes
from launch.errors import USER_ERRORS
from megalite.checkpoint import reader as checkpoint_reader
from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.reader import CheckpointReader
from megalite.config import Config, ModelConfig, resolve_layout
from megalite.engine.build import build_engine
from models.decoder import decoder_layers
from models.families import model_config
from tests.helpers.engine_cases import Batch
from tests.helpers.hub_models import HUB_MODELS, HubModel
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import forge
from tests.helpers.single_rank import write_single
from tests.unit.megalite.checkpoint.huggingface.test_weight_file_reader import as_pickles

MODELS = {model.name: model for model in HUB_MODELS}
LLAMA, TIED = MODELS["llama"], MODELS["llama-tied"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# These models' weights are ten times a real one's, which amplifies rounding: to 2e-5 of the logits' spread in some, and
# as much between transformers' own two attentions. A wrong conversion differs by 1e-2 and more.
TOLERANCE = 5e-5


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _config(folder: Path) -> dict[str, Any]:
    return transformers.AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": ""}


def _same_bits(one: Path, other: Path) -> bool:
    before, after = _weights(one), _weights(other)
    return before.keys() == after.keys() and all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items()
    )


@pytest.mark.parametrize(
    ("hub_model", "dtype"),
    # each family's models take turns with the dtypes; Llama has them all
    [(model, list(DTYPES)[number % 3]) for number, model in enumerate(HUB_MODELS)]
    + [(LLAMA, "bf16"), (LLAMA, "fp16"), (TIED, "fp32"), (TIED, "fp16")],
    ids=str,
)
def test_import_and_export_give_back_every_bit(tmp_path: Path, hub_model: HubModel, dtype: str) -> None:
    original = hub_model.save(tmp_path / "original", DTYPES[dtype], max_shard_size="60KB")
    imported = import_hugging_face(original, tmp_path / "checkpoint", validate=False)
    exported = export_hugging_face(tmp_path / "checkpoint", tmp_path / "exported")
    assert exported.logit_difference is not None and exported.logit_difference <= TOLERANCE
    assert imported.dtype == exported.dtype == dtype
    assert _same_bits(original, tmp_path / "exported")
    assert exported.tensors == imported.tensors == len(_weights(original))
    before, after = _config(original), _config(tmp_path / "exported")
    for config in (before, after):
        config.pop(
            "rope_parameters", None
        )  # of which transformers has several spellings: tests/unit/models/families/test_families.py
    assert {key: after[key] for key in before} == before
    generation = [
        json.loads((folder / "generation_config.json").read_text()) for folder in (original, tmp_path / "exported")
    ]
    assert generation[0] == generation[1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "qwen3_moe-some-dense"])
def test_tensors_of_several_dtypes_keep_their_own(tmp_path: Path, name: str) -> None:
    """Norms, or routers, in fp32 beside bf16: the manifest remembers the few that differ; --dtype overrules all."""
    original = MODELS[name].save(tmp_path / "original", torch.bfloat16)
    path = original / "model.safetensors"
    mixed = {key: tensor.float() if tensor.ndim == 1 else tensor for key, tensor in load_file(path).items()}
    save_file(mixed, path)
    assert import_hugging_face(original, tmp_path / "checkpoint", validate=False).dtype == "bf16"
    kept = CheckpointReader(tmp_path / "checkpoint").manifest.config["hugging_face"]
    assert kept["dtype"] == "bf16" and set(kept["dtypes"]) == {key for key, t in mixed.items() if t.ndim == 1}
    export_hugging_face(tmp_path / "checkpoint", tmp_path / "exported")
    assert _same_bits(original, tmp_path / "exported")
    export_hugging_face(tmp_path / "checkpoint", tmp_path / "fp16", dtype="fp16", validate=False)
    assert {tensor.dtype for tensor in _weights(tmp_path / "fp16").values()} == {torch.float16}

    again = import_hugging_face(original, tmp_path / "as fp32", dtype="fp32", validate=False)
    assert again.dtype == "fp32" and "dtypes" not in CheckpointReader(tmp_path / "as fp32").manifest.config
    assert export_hugging_face(tmp_path / "as fp32", tmp_path / "wide", validate=False).dtype == "fp32"
    assert all(torch.equal(_weights(tmp_path / "wide")[key], tensor.float()) for key, tensor in mixed.items())


def test_a_folder_with_a_copy_of_the_tied_head_exports_it_once(tmp_path: Path) -> None:
    """As transformers stores it; old folders hold both."""
    original = TIED.save(tmp_path / "original")
    path = original / "model.safetensors"
    once = load_file(path)
    save_file({**once, "lm_head.weight": once["model.embed_tokens.weight"].clone()}, path)
    import_hugging_face(original, tmp_path / "checkpoint", validate=False)
    export_hugging_face(tmp_path / "checkpoint", tmp_path / "exported", validate=False)
    assert _weights(tmp_path / "exported").keys() == once.keys()


def test_layers_of_multi_token_prediction_are_left_out_with_a_word_about_it(tmp_path: Path) -> None:
    """As DeepSeek-V3's folder has one behind the last layer; without a word its owner would believe it trained."""
    original = MODELS["deepseek_v3"].save(tmp_path / "original")
    weights = load_file(original / "model.safetensors")
    behind = {name.replace("layers.2.", "layers.3."): one for name, one in weights.items() if ".layers.2." in name}
    save_file({**weights, **{name: one.clone() for name, one in behind.items()}}, original / "model.safetensors")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (notice,) = plan_import(original, tmp_path / "checkpoint").notices
    assert notice.startswith(f"{len(behind)} tensors of layers behind the last one, for multi-token prediction")
    import_hugging_face(original, tmp_path / "checkpoint", validate=False)
    export_hugging_face(tmp_path / "checkpoint", tmp_path / "exported", validate=False)
    assert _weights(tmp_path / "exported").keys() == weights.keys()
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gpt_neox-tied-no-bias"])
def test_a_folder_of_the_base_model_is_imported_under_the_full_names(tmp_path: Path, name: str) -> None:
    """Saved from LlamaModel, GPT2Model ...: the same names without their prefix, and no head, which is tied."""
    whole = MODELS[name].build()
    whole.save_pretrained(tmp_path / "whole")
    whole.base_model.save_pretrained(tmp_path / "base")
    assert _weights(tmp_path / "whole").keys().isdisjoint(_weights(tmp_path / "base"))
    summary = import_hugging_face(tmp_path / "base", tmp_path / "checkpoint")
    assert summary.logit_difference is not None and summary.logit_difference <= TOLERANCE
    export_hugging_face(tmp_path / "checkpoint", tmp_path / "exported", validate=False)
    assert _same_bits(tmp_path / "whole", tmp_path / "exported")


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_are_imported_with_a_word_about_it(tmp_path: Path, shards: int) -> None:
    LLAMA.save(tmp_path / "hf")
    as_pickles(LLAMA.save(tmp_path / "pickled"), shards)
    summary = import_hugging_face(tmp_path / "pickled", tmp_path / "checkpoint")
    assert summary.logit_difference is not None and ".bin pickles" in summary.notices[0]
    export_hugging_face(tmp_path / "checkpoint", tmp_path / "exported", validate=False)
    assert _same_bits(tmp_path / "hf", tmp_path / "exported")


def test_what_would_be_done_is_what_is_done(tmp_path: Path) -> None:
    """A dry run's numbers against those of the files afterwards; it writes nothing."""
    original = LLAMA.save(tmp_path / "hf", torch.bfloat16, max_shard_size="60KB")
    plan = plan_import(original, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    done = import_hugging_face(original, tmp_path / "checkpoint", validate=False)
    assert (plan.model_type, plan.dtype, plan.tensors, plan.parameters) == ("llama", "bf16", 30, done.parameters)
    assert sorted(plan.files) == sorted(path.name for path in original.glob("*.safetensors"))
    assert plan.bytes_read == done.bytes_read == sum(p.stat().st_size for p in original.glob("*.safetensors"))
    assert plan.bytes_written == done.bytes_written == 4 * plan.parameters < plan.bytes_free

    back = plan_export(tmp_path / "checkpoint", tmp_path / "out", max_shard_bytes=30_000)
    assert not (tmp_path / "out").exists()
    made = export_hugging_face(tmp_path / "checkpoint", tmp_path / "out", max_shard_bytes=30_000, validate=False)
    assert sorted(back.files) == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert back.bytes_written == made.bytes_written == 2 * plan.parameters and back.bytes_read == 4 * plan.parameters


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
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, tp * pp, "cpu"))
    load_engine(engine, reader, weights_only=True)
    logits = engine.logits(Batch(tokens, tokens, None, np.arange(len(tokens))))
    return None if logits is None else logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "name"), [(2, 1, "starcoder2-tied"), (1, 2, "llama-tied"), (2, 2, "llama-biases")]
)
def test_an_imported_model_has_transformers_logits_on_any_layout(tmp_path: Path, tp: int, pp: int, name: str) -> None:
    """Catches a cut of fused weights, biases or an odd vocabulary that only several ranks see."""
    hub_model = MODELS[name]
    import_hugging_face(hub_model.save(tmp_path / "hf"), tmp_path / "checkpoint", validate=False)
    tokens = np.random.default_rng(0).integers(0, 131, (2, 17))
    results = run_ranks(_logits_on_rank, tp * pp, str(tmp_path / "checkpoint"), tp, pp, tokens)
    computed = [logits for logits in results if logits is not None]
    assert len(computed) == tp  # the ranks of the last stage
    with torch.no_grad():
        expected = hub_model.build()(torch.from_numpy(tokens)).logits.numpy()
    for logits in computed:
        assert np.abs(logits - expected).max() <= 1e-5 * expected.std()


def test_a_run_of_ours_exports_with_its_tokenizer(tmp_path: Path) -> None:
    """The newest checkpoint of a run folder, in the run's precision, stopping at the tokenizer's end token."""
    texts = ["def f(x): return x\n" * 50 + "".join(map(chr, range(32, 127)))]
    train_tokenizer(texts, tmp_path / "run" / KEPT, 270)
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
            step=step, config=config, tokenizer=RECORDED, state={},
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


def test_dropout_changes_nothing_about_an_export(tmp_path: Path) -> None:
    """The comparison of logits is an evaluation: in training mode it would find two different models."""
    run = _run_checkpoint(tmp_path / "run", LLAMA, dropout={"attention_dropout": 0.3, "embedding_dropout": 0.3})
    difference = export_hugging_face(run, tmp_path / "hf").logit_difference
    assert difference is not None and difference <= TOLERANCE


def _run_checkpoint(folder: Path, hub_model: HubModel, **manifest: Any) -> Path:
    """The checkpoint of a run on this model, random weights."""
    model = _model(hub_model).model_copy(update=manifest.pop("dropout", {}))
    tensors = ((name, 0.2 * torch.randn(shape)) for name, shape in global_shapes(model).items())
    config = {"model": model.model_dump(mode="json"), "precision": {"dtype": "fp32"}} | manifest.pop("config", {})
    write_single(folder, tensors, config=config, state={}, **({"tokenizer": None, "step": 3} | manifest))
    return folder


def _model(hub_model: HubModel) -> ModelConfig:
    return ModelConfig.model_validate(model_config(hub_model.config().to_diff_dict()))


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
    old = Path(shutil.copytree(tokenizer, tmp_path / "old"))
    train_tokenizer(["xyz " * 9], tokenizer, 258, overwrite=True)
    with pytest.raises(USER_ERRORS, match=rf"{digest}: .* replaced since: give its folder with --tokenizer$"):
        export_hugging_face(run, tmp_path / "other", validate=False)
    with pytest.raises(USER_ERRORS, match=rf"^--tokenizer {tokenizer} is another .* and {digest} is wanted"):
        export_hugging_face(run, tmp_path / "other", tokenizer=tokenizer, validate=False)
    assert not (tmp_path / "other").exists()
    export_hugging_face(run, tmp_path / "other", tokenizer=old / "tokenizer.json", validate=False)
    assert inspect_tokenizer(tmp_path / "other").sha256 == digest


def test_a_tokenizer_without_tokenizer_json_comes_along(tmp_path: Path) -> None:
    """By the digest of its files; an import of an older version has none, and an export says what to do."""
    original = LLAMA.save(tmp_path / "original")
    model = json.loads((train_tokenizer(["abc " * 9], tmp_path / "tok", 258) / "tokenizer.json").read_text())["model"]
    (original / "vocab.json").write_text(json.dumps(model["vocab"]))
    (original / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
    import_hugging_face(original, tmp_path / "checkpoint", validate=False)
    assert not export_hugging_face(tmp_path / "checkpoint", tmp_path / "exported", validate=False).notices
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "exported" / name).read_bytes() == (original / name).read_bytes()

    recorded = CheckpointReader(tmp_path / "checkpoint").manifest.config["hugging_face"][FILES_SHA256]
    forge(tmp_path / "checkpoint", f'"{FILES_SHA256}": "{recorded}"', '"more": ""')
    with pytest.raises(USER_ERRORS, match=rf"^{original}: .* no digest to know it by: give .* --tokenizer$"):
        export_hugging_face(tmp_path / "checkpoint", tmp_path / "older", validate=False)
    export_hugging_face(tmp_path / "checkpoint", tmp_path / "older", tokenizer=original, validate=False)
    assert (tmp_path / "older" / "merges.txt").is_file()


def test_a_checkpoint_that_retention_removes_meanwhile_is_exported_whole_or_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on beside an export, and keeps only its newest: the files are mapped once the export has begun, and
    where it has not, a newer one is there."""
    steps = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        _run_checkpoint(steps / f"step_{step:08d}", LLAMA, step=step)
    expected = {name: CheckpointReader(steps / "step_00000020").read(name) for name in global_shapes(_model(LLAMA))}

    def remove_it(what: str, done: int, total: int) -> None:
        if (steps / "step_00000020").exists():
            shutil.rmtree(steps / "step_00000020")

    summary = export_hugging_face(tmp_path / "run", tmp_path / "hf", report=remove_it)
    assert summary.source.endswith("step_00000020") and summary.logit_difference is not None
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _weights(tmp_path / "hf").items())

    found = checkpoint_reader.find_latest

    def find_and_lose(path: Path) -> Any:
        folder, skipped = found(path)
        if folder is not None and folder.name == "step_00000010":
            shutil.rmtree(folder)
            if path.name == "run":
                _run_checkpoint(steps / "step_00000030", LLAMA, step=30)
        return folder, skipped

    monkeypatch.setattr(checkpoint_reader, "find_latest", find_and_lose)
    newer = export_hugging_face(tmp_path / "run", tmp_path / "newer", validate=False)
    assert newer.source.endswith("step_00000030")
    _run_checkpoint(steps / "step_00000010", LLAMA, step=10)
    with pytest.raises(USER_ERRORS, match=r"removed while it was being opened|there is no such checkpoint"):
        export_hugging_face(steps / "step_00000010", tmp_path / "gone", validate=False)
    assert not (tmp_path / "gone").exists()
