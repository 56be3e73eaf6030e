"""Training starts from a Hugging Face folder on every layout, without a conversion, and computes what it computes.

The reference is transformers on one process. Models have random weights of every tensor (tests/helpers/hub_models.py).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.tokenizers.training import train_tokenizer
from launch.conversion.huggingface import folder_lookup
from launch.conversion.huggingface.importing import import_hugging_face
from launch.conversion.huggingface.model_folder import open_model_folder
from launch.errors import LaunchError
from launch.inference.stored_model import open_stored
from launch.trainer.data.opening import open_data
from launch.trainer.start.resume import Start, find_start
from launch.trainer.start.run_config import load_run_config
from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.errors import CheckpointError
from megalite.config import Config, ConfigError, ModelConfig
from megalite.config.model import DROPOUTS
from models.families import family
from models.hub.config_parts import FamilyError
from tests.conftest import VOCAB_SIZE, write_config
from tests.helpers.engine_cases import Case, assemble, engine_of, global_batches, local_weights, micro_batches_of
from tests.helpers.hub_models import HUB_MODELS, HubModel
from tests.helpers.rank_pool import run_ranks
from tests.unit.launch.cli.test_mistakes import command

BY_NAME = {model.name: model for model in HUB_MODELS}
STARTED = {  # renamed only, tied, fused, fused by head, transposed; by number of ranks
    2: [BY_NAME[name] for name in ("llama", "llama-tied", "phi3", "gpt_neox", "gpt2")],
    4: [BY_NAME[name] for name in ("llama-tied", "gpt_neox")],
}
LAYOUTS = {  # by number of ranks, which build one engine after the other
    2: [
        Case(tp=2),
        Case(tp=2, sequence_parallel=True, sequence=34),
        Case(pp=2),
        Case(dp=2, zero=1),
        Case(dp=2, zero=2),
        Case(dp=2, zero=3),
    ],
    4: [Case(tp=2, pp=2), Case(tp=2, dp=2, zero=3)],
}
SAME = 2e-5  # of a loss: fp32 sums in another order


def of_model(case: Case, model: ModelConfig) -> Case:
    """The case with this model; without its dropout, which would draw other masks than transformers does."""
    return replace(case, model=model.model_dump() | dict.fromkeys(DROPOUTS, 0.0))


def started(rank: int, cases: list[Case], folders: list[Path]) -> list[dict[str, Any]]:
    """Weights right after the start, and the loss of the first step, of each model in each case."""
    found = []
    for case, folder in itertools.product(cases, folders):
        hub = open_model_folder(folder)
        of_this = of_model(case, hub.model)
        engine = engine_of(of_this)
        load_engine(engine, hub.reader, weights_only=True)
        weights = local_weights(engine)
        batch = micro_batches_of(engine, of_this, global_batches(of_this)[0])
        found.append({"weights": weights, "loss": float(engine.train_step(batch, of_this.learning_rate).loss)})
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model in several files."""
    root = tmp_path_factory.mktemp("hub")
    return {model.name: model.save(root / model.name, max_shard_size="60KB") for model in STARTED[2]}


def loss_of_transformers(hub_model: HubModel, case: Case) -> float:
    batch = global_batches(case)[0]
    with torch.no_grad():
        logits = hub_model.build()(torch.from_numpy(batch.tokens)).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten()))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_starts_with_transformers_weights_and_loss(ranks: int, folders: dict[str, Path]) -> None:
    """A slice of the wrong rows has the right shape, and a name that is swapped with another's too: the loss tells."""
    results = run_ranks(started, ranks, LAYOUTS[ranks], [folders[model.name] for model in STARTED[ranks]])
    for number, (case, hub_model) in enumerate(itertools.product(LAYOUTS[ranks], STARTED[ranks])):
        of_ranks = [result[number] for result in results]
        hub = open_model_folder(folders[hub_model.name])
        wanted = loss_of_transformers(hub_model, of_model(case, hub.model))
        assert [one["loss"] for one in of_ranks] == [pytest.approx(wanted, rel=SAME)] * ranks, f"{hub_model}, {case}"
        weights, shapes = assemble(of_ranks), hub.reader.shapes
        assert weights.keys() == shapes.keys()
        for name, value in weights.items():
            whole = torch.empty(shapes[name])
            hub.reader.fill(whole, name, tuple(slice(0, n) for n in whole.shape))
            assert np.array_equal(value, whole.numpy()), f"{hub_model}, {case}: {name}"


def refused(rank: int, folder: Path, dtype: str) -> str:
    hub = open_model_folder(folder)
    with pytest.raises(CheckpointError) as caught:
        load_engine(engine_of(of_model(Case(dtype=dtype), hub.model)), hub.reader, weights_only=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("number", "dtype", "problem"),
    [
        (math.nan, "fp32", "holds NaN or infinite numbers, from which no step can begin"),
        (-1e5, "fp16", "holds -100000, and fp16 ends at 65504: set precision.dtype to bf16 or fp32"),
    ],
)
def test_weights_that_no_step_can_begin_with_are_refused_by_name(
    number: float, dtype: str, problem: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The guard stopped the run at step 1, and advised an earlier checkpoint and the same command again."""
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "damaged"))
    tensors = load_file(weight_file(folder))
    name = sorted(tensors)[0]
    tensors[name].view(-1)[-1] = number
    save_file(tensors, weight_file(folder))
    (said,) = run_ranks(refused, 1, folder, dtype)
    assert said.startswith(f"{folder}: {name} {problem}"), said


@pytest.fixture(scope="module")
def hub(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in bf16, in several files, with the corpus' tokenizer; more rows than that has ids."""
    folder = HubModel("", "llama", {"vocab_size": VOCAB_SIZE + 11}).save(
        tmp_path_factory.mktemp("hub") / "model", torch.bfloat16, max_shard_size="60KB"
    )
    for path in (corpus.parent / "tokenizer").glob("token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def tuned(tiny: dict[str, Any], hub: Path) -> dict[str, Any]:
    """A config that starts from it and says nothing of the model."""
    del tiny["model"]
    tiny["training"]["initialize_from"] = str(hub)
    return tiny


def load(config: dict[str, Any], folder: Path, *overrides: str) -> Config:
    return load_run_config(write_config(folder / "config.yaml", config), overrides)


def test_the_models_options_are_the_folders(tuned: dict[str, Any], hub: Path, tmp_path: Path) -> None:
    config = load(tuned, tmp_path)
    theirs = json.loads((hub / "config.json").read_text())
    assert config.model.intermediate_size == 101 and config.model.rope_theta == 5e5
    assert all(getattr(config.model, key) == theirs[key] for key in ("hidden_size", "vocab_size", "rms_norm_eps"))
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert load_run_config(tmp_path / "resolved.yaml") == config, "the run's own config.yaml says all of it"


def test_options_that_change_nothing_of_what_it_computes_may_differ(tuned: dict[str, Any], tmp_path: Path) -> None:
    free = {"residual_dropout": 0.1, "initializer_range": 0.5, "max_position_embeddings": 4096}
    given = load(tuned | {"model": free | {"hidden_size": 48}}, tmp_path).model
    assert given == load(tuned, tmp_path).model.model_copy(update=free)


OTHER_OPTIONS: dict[str, tuple[str, str]] = {
    "model.hidden_size=64": ("hidden_size is 64 in this config and 48 in", "leave it out, or set it alike"),
    "model.rope_theta=1e4": ("rope_theta is 10000.0 in this config and 500000.0 in", "config.json"),
    "model.tie_word_embeddings=true": ("tie_word_embeddings is true in this config and false in", "config.json"),
    "model.hidden_act=gelu": ("hidden_act is gelu in this config and silu in", "config.json"),
    "model.hidden_size=wide": ("model.hidden_size must be", "wide"),
    "model.hiden_size=48": ("hiden_size", "did you mean"),
}


@pytest.mark.parametrize("override", OTHER_OPTIONS)
def test_another_option_is_refused(override: str, tuned: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load(tuned, tmp_path, override)
    said = str(caught.value)
    assert "\n" not in said and all(fragment in said for fragment in OTHER_OPTIONS[override]), said


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_neox", "olmo2", "qwen3"])
def test_a_model_type_sets_what_its_family_fixes(model_type: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    """A fresh model of a family needs its sizes only; an option that contradicts the family is still refused."""
    tiny["model"] |= {"model_type": model_type, "query_pre_attn_scalar": 8} | (
        {} if model_type == "gemma3_text" else {"query_pre_attn_scalar": None}
    )
    tiny["model"].pop("num_key_value_heads", None)
    model = load(tiny, tmp_path).model
    fixed = family(model_type).all_fixed
    assert fixed and all(getattr(model, option) == value for option, value in fixed.items())
    other = load(tiny, tmp_path, f"model.gated_mlp={'true' if model_type == 'gpt_neox' else 'false'}").model
    with pytest.raises(FamilyError, match=f"is no {model_type} model, whose gated_mlp is"):
        family(model_type).check(other)


def test_without_a_folder_a_model_is_still_required(tuned: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="section model is required"):
        load(tuned, tmp_path, "training.initialize_from=null")


Change = Callable[[Path], object]  # to a copy of the folder


def change_config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def weight_file(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def drop_tensor(folder: Path) -> None:
    tensors = load_file(weight_file(folder))
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name}, weight_file(folder))


def cut_short(folder: Path) -> None:
    os.truncate(weight_file(folder), weight_file(folder).stat().st_size - 100)


def other_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()
    train_tokenizer(["abc " * 99], folder, 258)


def linked_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.rename(folder.parent / "elsewhere.json")
    path.symlink_to(folder.parent / "elsewhere.json")


BROKEN: dict[str, tuple[Change, list[str]]] = {
    "a file is missing": (lambda f: weight_file(f).unlink(), ["model-00002-of-", "missing"]),
    "a tensor is missing": (drop_tensor, ["model-00002-of-", "holds no"]),
    "a file is cut short": (cut_short, ["model-00002-of-", "not readable as safetensors"]),
    "another shape": (change_config(intermediate_size=102), ["[101, 48]", "[102, 48]"]),
    "unknown family": (change_config(model_type="mamba"), ["mamba"]),
    "a key that nothing reads": (change_config(logit_scale=2.0), ["logit_scale"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["not a complete checkpoint"]),
    "another tokenizer": (other_tokenizer, ["text was prepared with another tokenizer", "prepare it again"]),
    "a tokenizer elsewhere": (linked_tokenizer, ["tokenizer.json", "leads out of its folder"]),
    "a size of no model": (change_config(hidden_size=10**18, head_dim=12), ["more numbers than any model has"]),
    "fewer rows than the data has ids": (
        lambda f: HubModel("", "llama", {"vocab_size": 131}).save(f),
        ["vocabulary of 320", "131"],
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_folder_is_one_sentence_before_any_rank_starts(
    broken: str,
    tuned: dict[str, Any],
    hub: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    change, fragments = BROKEN[broken]
    folder = Path(shutil.copytree(hub, tmp_path / "copy"))
    change(folder)
    tuned["training"]["initialize_from"] = str(folder)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = ["train", str(write_config(tmp_path / "config.yaml", tuned))]
    for dry in ([], ["--dry-run"]):
        code, out, err = command(words + dry, monkeypatch, capfd)
        assert code == 2 and "starting" not in out
        assert err.startswith("megalite: error: ") and err.count("\n") == 1, err
        assert all(fragment in err for fragment in fragments), err


def test_a_tokenizer_that_was_only_saved_anew_is_the_same(tuned: dict[str, Any], hub: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hub, tmp_path / "copy"))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text())))  # other spaces, other bytes
    tuned["training"]["initialize_from"] = str(folder)
    config = load(tuned, tmp_path)
    data, model = open_data(config), open_model_folder(folder)
    assert model.tokenizer_sha256 != data.tokenizer_sha256
    model.check_tokenizer(Path(config.data.path[0]), data.tokenizer, data.tokenizer_sha256)
    import_hugging_face(folder, tmp_path / "imported", validate=False)
    open_stored(tmp_path / "imported").check_prepared(Path(config.data.path[0]))  # `megalite evaluate` of it


def test_an_imported_checkpoint_is_looked_at_as_its_folder_would_be(
    tuned: dict[str, Any], hub: Path, tmp_path: Path
) -> None:
    """Its tokenizer, and the length that its angles depend on: both would change what is trained, without a word."""
    folder = Path(shutil.copytree(hub, tmp_path / "copy"))
    change_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_parameters=None, rope_theta=1e4)(folder)
    import_hugging_face(folder, tmp_path / "same words", validate=False)
    other_tokenizer(folder)
    import_hugging_face(folder, tmp_path / "other words", validate=False)

    def start(checkpoint: str, *overrides: str) -> Start:
        config = load(tuned, tmp_path, f"training.initialize_from={tmp_path / checkpoint}", *overrides)
        return find_start(config, open_data(config), None, [])

    assert start("same words").checkpoint == tmp_path / "same words"
    with pytest.raises(LaunchError, match="was prepared with another tokenizer"):
        start("other words")
    with pytest.raises(CheckpointError, match=r"model.max_position_embeddings is 64, this config's is 128"):
        start("same words", "model.max_position_embeddings=128")


def test_a_model_of_the_hub_is_found_in_its_cache(
    tuned: dict[str, Any], hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a download: no network is there, and none is needed for what is there already."""
    import huggingface_hub.constants as constants

    repository = tmp_path / "cache" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    shutil.copytree(hub, repository / "snapshots" / "c0ffee")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    tuned["training"]["initialize_from"] = "some/model"
    fetched: list[list[str]] = []
    download = folder_lookup._download

    def recorded(hub_id: str, patterns: list[str]) -> Path:
        fetched.append(patterns)
        return download(hub_id, patterns)

    monkeypatch.setattr(folder_lookup, "_download", recorded)
    assert load(tuned, tmp_path).model.hidden_size == 48
    assert fetched and folder_lookup.WEIGHTS not in fetched  # a dry run needs none
    assert open_model_folder(Path("some/model")).model.hidden_size == 48
    assert folder_lookup.WEIGHTS in fetched
    tuned["training"]["initialize_from"] = "some/other"
    with pytest.raises(ValueError, match=r"some/other: there is no folder .*, and the hub did not give it"):
        load(tuned, tmp_path)
