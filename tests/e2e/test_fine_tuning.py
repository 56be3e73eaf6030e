"""From a Hugging Face folder to another one: training on several ranks in between, killed on the way."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from launch.errors import USER_ERROR_CODE
from launch.trainer.local_run import start_local_run
from launch.trainer.start.run_config import load_run_config
from megalite.checkpoint.reader import CheckpointReader
from tests.conftest import VOCAB_SIZE, write_config
from tests.e2e.conftest import References
from tests.helpers.audit import audit_against, events
from tests.helpers.commands import BIN, run
from tests.helpers.faults import die_at
from tests.helpers.hub_models import HubModel
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

BATCH, STEPS, INTERVAL = 4, 6, 3


@pytest.fixture(scope="module")
def hub(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tied Llama in bf16 with the corpus' tokenizer, a chat template and settings of its own."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    switches = {"vocab_size": VOCAB_SIZE + 11, "tie_word_embeddings": True, "eos_token_id": [7, 9], "pad_token_id": 3}
    HubModel("", "llama", switches).save(folder, torch.bfloat16, max_shard_size="60KB")
    for path in (corpus.parent / "tokenizer").glob("token*"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    settings = json.loads((folder / "generation_config.json").read_text()) | {"do_sample": True, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def tuned(tiny: dict[str, Any], hub: Path, tmp_path: Path) -> dict[str, Any]:
    """Two stages, from a copy of the folder."""
    del tiny["model"]
    copy = shutil.copytree(hub, tmp_path / "model")
    tiny["training"] |= {"steps": STEPS, "initialize_from": str(copy)}
    tiny["optimizer"] = {"learning_rate": 1e-2}  # bf16 would round small steps away
    tiny["monitor"] = {"plot": False, "report": False}
    tiny["checkpoint"] = {"interval": INTERVAL}
    return tiny | {"parallel": {"pipeline_parallel_size": 2}}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_killed_and_resumed_without_the_folder_equals_uninterrupted(
    tuned: dict[str, Any], references: References, hub: Path, tmp_path: Path
) -> None:
    """What the model carries is in the checkpoints and beside them: special tokens, settings, dtype, chat template."""
    whole = references.of(tuned).run_dir
    run_dir, every = Path(tuned["run_dir"]), "checkpoint.export_hf=every"
    death = (die_at, ("committed, not pruned", 0, [0, 1], 1))
    with session(tmp_path / "session", tuned, every, fault=death) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output()
    assert not list((run_dir / "hugging_face").glob("step_*"))
    shutil.rmtree(tmp_path / "model")
    said = train(tmp_path / "session", tuned, every)
    assert f"resumes from step {INTERVAL} of" in said
    audit_against(whole, run_dir, BATCH)

    exported = [run_dir / "hugging_face" / f"step_{step:08d}" for step in (INTERVAL, STEPS)]
    assert [event["folder"] for event in events(run_dir, "exported")] == list(map(str, exported))
    assert {path.name for path in (run_dir / "hugging_face").iterdir()} == {path.name for path in exported}
    for folder in exported:
        reader = CheckpointReader(run_dir / "checkpoints" / folder.name)
        weights, original = weights_of(folder), weights_of(hub)
        assert weights.keys() == original.keys() == reader.shapes.keys(), "Llama's names are ours; the head is tied"
        for name, tensor in weights.items():
            assert torch.equal(tensor, reader.read(name).bfloat16()), name
        assert not torch.equal(weights["model.norm.weight"], original["model.norm.weight"]), "it has been trained"
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (folder / name).read_bytes() == (hub / name).read_bytes()
        for read in (transformers.AutoConfig.from_pretrained, transformers.GenerationConfig.from_pretrained):
            before, after = (read(place).to_dict() | {"_name_or_path": ""} for place in (hub, folder))
            assert after == before | {"eos_token_id": [0, 7, 9]}  # the end token of the documents first
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported[-1])
    assert loaded.dtype == torch.bfloat16 and loaded.generation_config.eos_token_id == [0, 7, 9]

    damaged = max(run_dir.glob(f"checkpoints/{exported[-1].name}/*.safetensors"))  # of one rank; both must know
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    tuned["training"]["initialize_from"] = str(damaged.parent)
    with session(tmp_path / "session", tuned, f"run_dir={tmp_path / 'next'}") as running:
        assert running.wait() == [USER_ERROR_CODE] * 2, running.output()
        assert f"{damaged.name} has changed since it was written: its digest differs" in running.output()


def test_one_command_from_folder_to_folder(
    tuned: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a user runs it; and again, after the folder of the last step was lost: it is made without any training."""
    folder = Path(tuned["run_dir"]) / "hugging_face" / "step_00000002"
    source = tuned["training"].pop("initialize_from")
    path = write_config(tmp_path / "c.yaml", tuned)
    overrides = [f"training.initialize_from={source}", "training.steps=2", "parallel.pipeline_parallel_size=1"]
    overrides += ["checkpoint.export_hf=last", "checkpoint.export_hf_dtype=fp32"]
    done = run(BIN / "megalite", "train", path, *overrides)
    assert done.returncode == 0, done.stderr
    assert "logits compared with transformers'" in done.stdout and f"new, with the weights of {source}\n" in done.stdout
    first = weights_of(folder)
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}
    shutil.rmtree(folder)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert start_local_run(load_run_config(path, overrides), [str(path), *overrides]) == 0
    assert "nothing left to train" in capfd.readouterr().out
    second = weights_of(folder)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    shutil.rmtree(folder.parent)
    monkeypatch.setattr("megalite.checkpoint.atomic_folder.room_at", lambda folder: 0)  # a disk that is full
    assert start_local_run(load_run_config(path, overrides), [str(path), *overrides]) == 0  # the run itself is done
    assert f"{folder} is NOT made" in capfd.readouterr().err
