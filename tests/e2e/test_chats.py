"""The page about fine-tuning, from a file of conversations to a conversation: its commands, on a small model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from data_pipeline.tokenizers.training import train_tokenizer
from megalite.checkpoint.manifest import read_manifest
from tests.e2e.test_documented_commands import commands_of, words_of
from tests.helpers.commands import ROOT, command_line, metrics, run
from tests.helpers.hub_models import HubModel

pytestmark = pytest.mark.slow

VOCABULARY = 400


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder as the quickstart leaves it, with a smaller model."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    model = tmp_path / "runs/quickstart/hf"
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "max_position_embeddings": 256,
    }
    HubModel("", "llama", sizes).save(model, torch.float32)
    texts = [path.read_text() for path in (ROOT / "configs/chat").iterdir()]
    train_tokenizer([*texts, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))], model, VOCABULARY)
    return tmp_path


@pytest.mark.timeout(900)  # five whole commands
def test_from_conversations_to_a_conversation(workplace: Path) -> None:
    """An answer that the run has seen comes back, and ends by itself: template, mask and end token agree."""
    page = commands_of(ROOT / "docs/fine_tuning.md")
    lines = [line for line in page if "runs/chat" in line or "configs/chat" in line]
    assert [words_of(line)[1][1] for line in lines][1:] == ["prepare", "data", "train", "generate"]
    for line in lines:
        words = words_of(line)[1]
        if words[1] in ("train", "-c"):
            quickly = ["monitor.plot=false", "monitor.report=false"] if words[1] == "train" else []
            done = run(*words, *quickly, cwd=workplace)
        else:
            done = command_line(*words[1:], cwd=workplace, env={"DS_ACCELERATOR": "cpu"})
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    losses = [record["loss"] for record in metrics(workplace / "runs/chat/run")]
    assert losses[-1] < 0.2 * losses[0], losses
    assert done.stdout.strip() == "for item in items:" and "up to an end token" in done.stderr
    meta = json.loads((workplace / "runs/chat/data/chats.meta.json").read_text())
    saved = read_manifest(workplace / "runs/chat/run/checkpoints/step_00000060").config
    assert saved["ends_of_turns"] == [meta["end_of_turn_id"]] == [0]  # where exports of it end
    assert meta["document_count"] == 12 and meta["train_on"] == "all-turns" and meta["skipped_rows"] == 0
