"""A run that trains adapters beside a Hugging Face model, and what comes out of it: for peft, merged, and for us."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.conversion.huggingface.exporting import export_hugging_face
from launch.conversion.huggingface.serial_model import serial_model
from launch.inference.stored_model import open_stored
from megalite.checkpoint.reader import CheckpointReader
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.loss import head_logits
from tests.conftest import VOCAB_SIZE
from tests.helpers.hub_models import HubModel
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture
def adapted(tiny: dict[str, Any], corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """Two stages, beside a small Llama in fp32 with the corpus' tokenizer."""
    hub = tmp_path / "model"
    HubModel("", "llama", {"vocab_size": VOCAB_SIZE}).save(hub, torch.float32)
    for path in (corpus.parent / "tokenizer").glob("token*"):
        shutil.copy(path, hub)
    del tiny["model"]
    tiny["training"] |= {"steps": STEPS, "initialize_from": str(hub)}
    return tiny | {
        "adapter": {"name": "lora", "rank": 4, "alpha": 6, "targets": ["q_proj", "v_proj", "down_proj"]},
        "optimizer": {"learning_rate": 3e-2},
        "parallel": {"pipeline_parallel_size": 2},
        "checkpoint": {"interval": 2, "export_hf": "last"},
        "monitor": {"plot": False, "report": False},
    }


def test_peft_and_transformers_compute_with_a_runs_exports_what_we_do(adapted: dict[str, Any], tmp_path: Path) -> None:
    """A factor under a wrong name, a wrong scale, or a weight that is merged twice moves logits by far more than
    rounding does, 1e-6 of their spread."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    run_dir, source = Path(adapted["run_dir"]), Path(adapted["training"]["initialize_from"])
    train(tmp_path / "session", adapted)
    folder, merged = run_dir / "hugging_face" / f"step_{STEPS:08d}", tmp_path / "merged"
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(source) and described["lora_alpha"] == 6
    assert described["target_modules"] == ["down_proj", "q_proj", "v_proj"] and (folder / "tokenizer.json").is_file()
    summary = export_hugging_face(run_dir, merged, merge=True)
    assert summary.logit_difference is not None and summary.logit_difference < 1e-5

    stored, draw = open_stored(run_dir), torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (3, 29), generator=draw)
    reader = CheckpointReader(run_dir / "checkpoints" / f"step_{STEPS:08d}")
    with torch.no_grad():
        hidden, head = serial_model(stored.model, TensorParallel(), stored.weights.read)(tokens)  # type: ignore[union-attr]
        ours = head_logits(hidden, head, VOCAB_SIZE, TensorParallel())
        before, of_peft, of_merged = (
            kind.from_pretrained(place, dtype=torch.float32)(tokens).logits
            for kind, place in (
                (AutoModelForCausalLM, source),
                (AutoPeftModelForCausalLM, folder),
                (AutoModelForCausalLM, merged),
            )
        )
    spread = ours.std()
    assert (of_peft - ours).abs().max() < 1e-5 * spread and (of_merged - ours).abs().max() < 1e-5 * spread
    assert (before - ours).abs().max() > 1e-2 * spread, "nothing was trained"
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    moved = [name for name in stored.weights.shapes if not torch.equal(reader.read(name), original[name])]
    assert not moved, "frozen weights have moved"


def test_a_killed_run_with_adapters_goes_on_and_not_with_others(adapted: dict[str, Any], tmp_path: Path) -> None:
    """What was trained is in the checkpoint with the frozen weights: the model's folder is not needed any more."""
    del adapted["checkpoint"]["export_hf"]
    train(tmp_path / "first", adapted, "training.steps=2")
    shutil.rmtree(adapted["training"]["initialize_from"])
    with session(tmp_path / "second", adapted, "adapter.rank=5") as running:
        assert set(running.wait()) == {2}
        assert "adapter.rank 4, this config has 5" in running.output()
    said = train(tmp_path / "third", adapted, "parallel.pipeline_parallel_size=1", "parallel.data_parallel_size=2")
    assert "resumes from step 2" in said
