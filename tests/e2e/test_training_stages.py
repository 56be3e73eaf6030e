"""Runs whose batch changes on the way: as transformers on every layout, and after a kill on either side."""

from __future__ import annotations

import copy
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from data_pipeline.samples.dataset import PackedSamples
from tests.conftest import VOCAB_SIZE, write_config
from tests.helpers.commands import command_line, metrics
from tests.helpers.faults import die_at, poisoned
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

LONGEST, STEPS, RATE, CLIP = 64, 9, 0.5, 0.6
SHAPES = [*[(4, 32)] * 3, *[(8, 32)] * 3, *[(4, 64)] * 3]  # sequences and their length, by step
STAGES = [
    {"from_tokens": 350, "global_batch_size": 8, "micro_batch_size": 2},
    {"from_steps": 6, "global_batch_size": 4, "sequence_length": LONGEST, "micro_batch_size": 1},
]
PIPELINE = {"pipeline_parallel_size": 2}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "one rank": {},
    "data": {"parallel": {"data_parallel_size": 2}},
    "tensor, sequence cut": {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
    "1f1b": {"parallel": PIPELINE},
    "zb-v": {"parallel": PIPELINE | {"pipeline_schedule": "zb-v"}},
    "zero 3": {"parallel": {"data_parallel_size": 2, "zero_stage": 3}},
    "offloaded": {"parallel": {"data_parallel_size": 2}, "offload": {"optimizer": "cpu"}},
    "zero 2": {"parallel": {"data_parallel_size": 2, "zero_stage": 2}},
    "interleaved": {"parallel": PIPELINE | {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}},
    "zero-bubble": {"parallel": PIPELINE | {"pipeline_schedule": "zero-bubble"}},
    "dualpipev": {"parallel": PIPELINE | {"pipeline_schedule": "dualpipev"}},
}
SPOILED = 20  # a sample of step 7
RATES = [
    RATE * factor for factor in (0.25, 0.5, 0.75, *[2**0.5] * 6)
]  # a warm-up of 512 tokens, then of twice the batch
USUAL = ("one rank", "data", "tensor, sequence cut", "1f1b", "zb-v", "zero 3")


@pytest.fixture(scope="module")
def hub(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama of four layers, so that a folded pipeline adds two gradients of its embedding on one rank."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for path in (corpus.parent / "tokenizer").glob("token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def staged(tiny: dict[str, Any], hub: Path) -> dict[str, Any]:
    """Nine steps: three of 4 x 32 tokens, three of 8 x 32, and three of 4 x 64."""
    del tiny["model"]
    tiny["training"] |= {
        **{"steps": STEPS, "micro_batch_size": 1, "initialize_from": str(hub), "stages": STAGES},
        **{"gradient_clipping": CLIP, "evaluation": {"interval": 5, "samples": 4}},
    }
    tiny["optimizer"] = {"name": "sgd", "learning_rate": RATE, "weight_decay": 0.0}
    tiny["optimizer"] |= {"scale_with_batch": "sqrt", "reference_batch_size": 4}
    tiny["schedule"] = {"name": "constant", "warmup_tokens": 512}
    tiny["monitor"] = {"plot": False, "report": False}
    return tiny


@pytest.fixture(scope="module")
def reference(hub: Path, corpus: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of the same training by transformers, in float64.

    The tokens are those of the samples 0, 1, ... of the longest length, in a row.
    """
    samples, taken, found = PackedSamples([corpus], LONGEST, 0, "train", 0.3), 0, []
    model = transformers.AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float64, attn_implementation="eager")
    for (rows, length), rate in zip(SHAPES, RATES, strict=True):
        count = rows * length // LONGEST
        read = [samples.sample(k).tokens.astype(np.int64) for k in range(taken, taken + count)]
        inputs, targets = (np.concatenate([one[cut] for one in read]) for cut in (slice(None, -1), slice(1, None)))
        taken += count
        logits = model(torch.from_numpy(inputs.reshape(rows, length))).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets))
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
        found.append((loss.item(), norm.item()))
    assert all(norm > CLIP for _, norm in found), "the clip bites in each step"
    return found


def trained(folder: Path, config: dict[str, Any], layout: str, *overrides: str) -> list[dict[str, Any]]:
    config = config | LAYOUTS[layout] | {"run_dir": str(folder / "run")}
    train(folder, config, *overrides, world_size=2 if config.get("parallel") else 1)
    return metrics(config["run_dir"])


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.exhaustive) for name in LAYOUTS]
)
def test_every_layout_trains_as_transformers_over_changes_of_the_batch(
    layout: str, staged: dict[str, Any], reference: list[tuple[float, float]], tmp_path: Path
) -> None:
    """A stage that kept the former number of micro-batches, weight of a token, program, rotary angles or size of
    messages would differ from its first step on; a change of the data's order would too. fp32 against float64."""
    records = trained(tmp_path, staged, layout)
    assert [(one["global_batch_size"], one["sequence_length"]) for one in records] == SHAPES
    for record, (loss, norm) in zip(records, reference, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=2e-5), (layout, record["step"])
        assert record["grad_norm"] == pytest.approx(norm, rel=2e-4), (layout, record["step"])
    assert [one["learning_rate"] for one in records] == pytest.approx(RATES, rel=1e-12), layout
    assert [one["samples"] for one in records[2:5]] == [[4, 6], [6, 10], [10, 14]]
    assert records[-1]["tokens_seen"] == sum(rows * length for rows, length in SHAPES) == 64 * records[-1]["samples"][1]


@pytest.mark.parametrize("layout", ["tensor, sequence cut", "zb-v"])
def test_documents_and_dropout_are_the_same_on_every_layout_over_changes_of_the_batch(
    layout: str, staged: dict[str, Any], tmp_path: Path
) -> None:
    """What travels with hidden states has the shape of the stage too: positions, and the numbers of sequences."""
    staged["data"]["document_mask"] = True
    dropout = ("model.residual_dropout=0.1", "model.embedding_dropout=0.1")
    alone, cut = (trained(tmp_path / name, staged, name, *dropout) for name in ("one rank", layout))
    for one, other in zip(alone, cut, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-5), one["step"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-4), one["step"]


@pytest.mark.parametrize("saved_step", [2, 5, 6])
def test_killed_and_resumed_on_another_layout_equals_uninterrupted(
    saved_step: int, staged: dict[str, Any], reference: list[tuple[float, float]], tmp_path: Path
) -> None:
    """Before, between and at a change: no sample is lost or read twice, and the batches are those of the place."""
    staged["checkpoint"] = {"interval": saved_step, "keep_last": 1}
    pipeline = staged | {"parallel": PIPELINE}
    with session(tmp_path, pipeline, fault=(die_at, ("committed, not pruned", 0, [0, 1], 1))) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output()
    said = train(tmp_path, staged | {"parallel": {"data_parallel_size": 2}})
    assert f"resumes from step {saved_step} of {STEPS}" in said
    records = metrics(staged["run_dir"])
    assert [one["samples"][0] for one in records[1:]] == [one["samples"][1] for one in records[:-1]]
    assert [(one["global_batch_size"], one["sequence_length"]) for one in records] == SHAPES
    for record, (loss, _) in zip(records, reference, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=2e-5), record["step"]
    assert [one["learning_rate"] for one in records] == pytest.approx(RATES, rel=1e-12)


def spoiled_and_late(folder: Path, rank: int, is_late: bool) -> None:
    """The loss of one sample is NaN where it is read whole; results are read a step late, as on a GPU."""
    from megalite.engine.engine import Engine

    poisoned(folder, rank, SPOILED, LONGEST)
    initialize = Engine._initialize

    def initialized(self: Any, model: Any) -> None:
        initialize(self, model)
        self.runs_ahead = is_late

    Engine._initialize = initialized  # type: ignore[method-assign]


def test_a_rollback_over_a_change_goes_on_with_the_batches_of_the_earlier_step(
    staged: dict[str, Any], tmp_path: Path
) -> None:
    """Step 7, the first of long sequences, is bad, and step 5 is saved: steps 6 and 7 are done on the samples behind,
    of which step 6 reads short sequences, whether or not its result is read when the next step has begun."""
    staged["guards"], staged["checkpoint"] = {"not_finite": "rollback"}, {"interval": 5}
    found = []
    for name, is_late in (("one rank", True), ("1f1b", False), ("data", True)):
        config = staged | LAYOUTS[name] | {"run_dir": str(tmp_path / name / "run")}
        world_size = 2 if LAYOUTS[name] else 1
        said = train(tmp_path / name, config, world_size=world_size, fault=(spoiled_and_late, (is_late,)))
        assert "step 7" in said and "back to step 5, without samples 14 to 21" in said, said
        records = metrics(config["run_dir"])
        assert [(one["global_batch_size"], one["sequence_length"]) for one in records] == SHAPES
        assert [one["samples"] for one in records[4:]] == [[10, 14], [22, 26], [26, 30], [30, 34], [34, 38]]
        assert not any(one["skipped"] for one in records)
        found.append([one["loss"] for one in records])
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=2e-5)


def test_a_restart_changes_the_batches_to_come_alone(staged: dict[str, Any], tmp_path: Path) -> None:
    """A stage that is added behind the checkpoint begins there, and a change of what is done is refused with its first
    step, before a rank starts."""
    train(tmp_path, staged, "training.steps=5", world_size=1)
    for stages, said in (
        (STAGES[1:], "step 4 (token 384) with 8 sequences of 32 tokens, and this config has 4 sequences of 32 tokens"),
        (STAGES[:1], "has read samples of 64 tokens, the longest sequence of its config, and the longest of this"),
    ):
        changed = copy.deepcopy(staged)
        changed["training"]["stages"] = stages
        path = write_config(tmp_path / "changed.yaml", changed)
        refused = command_line("train", str(path))
        assert refused.returncode == 2 and said in refused.stderr, refused.stderr
    staged["training"]["stages"] = [*STAGES, {"from_steps": 8, "global_batch_size": 2, "sequence_length": 32}]
    said = train(tmp_path, staged, world_size=1)
    assert "from the stage from_steps 8, after step 8 (token 1,664), on: 2 sequences x 32 tokens" in said
    shapes = [(one["global_batch_size"], one["sequence_length"]) for one in metrics(staged["run_dir"])]
    assert shapes == [*SHAPES[:8], (2, 32)]


def test_a_mix_goes_on_over_changes_of_the_batch(staged: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    """To the bit: a run that was stopped in each stage equals one that was not, each source goes on where it was, and
    its weights change with a step."""
    sources = {"text": {"path": str(corpus), "weight": 2}, "again": {"path": str(corpus), "weight": 1}}
    weights = [{"from_tokens": 700, "weights": {"again": 0}}]
    staged["data"] = {"sources": sources, "stages": weights, "held_out_fraction": 0.3, "document_mask": True}
    found = []
    for name, lengths in (("whole", [9]), ("stopped", [2, 5, 7, 9])):
        config = staged | {"run_dir": str(tmp_path / name / "run")}
        for steps in lengths:
            said = train(tmp_path / name, config, f"training.steps={steps}", world_size=1)
        is_told = "the stage from_tokens 700 begins after step 5, at sample 14 (token 896)" in said
        assert is_told == (name == "whole"), "by the last session of the other one it has begun"
        names = ("step", "loss", "grad_norm", "samples", "source_tokens", "tokens_seen")
        names = (*names, "source_losses", "source_targets")
        found.append([tuple(record[name] for name in names) for record in metrics(config["run_dir"])])
    assert found[0] == found[1]
    taken = [record[4] for record in found[0]]
    assert [sum(one.values()) for one in taken] == [record[5] for record in found[0]]
    assert taken[4]["again"] == taken[-1]["again"] > 0
    for _, loss, *_, losses, targets in found[0]:
        mean = sum(losses[name] * targets[name] for name in losses) / sum(targets.values())
        assert mean == pytest.approx(loss, rel=1e-5), "each row of a step belongs to one source"
