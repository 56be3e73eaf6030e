"""Runs on a mix of sources: the same on every layout, and after a restart that gives the mix another future."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.storage.indexed_writer import IndexedWriter
from launch.inspection.data_audit import AuditedRun
from tests.conftest import VOCAB_SIZE
from tests.helpers.commands import metrics
from tests.helpers.warm_runs import train as warm_train

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one rank": {},
    "data": {"data_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
EXACT = ("step", "loss", "grad_norm", "samples", "source_tokens", "source_losses", "source_targets")


@pytest.fixture
def mixed_run(tiny: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A run of six steps on text and on numbers, whose weights change after the third step."""
    random = np.random.default_rng(5)
    with IndexedWriter(tmp_path / "numbers", np.uint16) as writer:
        for length in random.integers(1, 90, 60):
            writer.append(random.integers(1, VOCAB_SIZE, length).astype(np.uint16), np.array([length]))
    text = tiny["data"].pop("path")
    tiny["data"] |= {
        "sources": {
            "text": {"path": text, "weight": 0.6},
            "numbers": {"path": str(tmp_path / "numbers"), "weight": 0.4},
        },
        "stages": [{"from_steps": 3, "weights": {"numbers": 6}}],
        "document_mask": True,
    }
    tiny["training"] |= {"steps": 6, "evaluation": {"interval": 3, "samples": 4}}
    tiny["schedule"] = {"name": "constant"}
    return tiny


def curve(config: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in EXACT) for record in metrics(config["run_dir"])]


def test_every_layout_trains_on_one_stream(mixed_run: dict[str, Any], tmp_path: Path) -> None:
    """I1: the samples of a step and their sources are equal; losses, those of each set too, up to rounding."""
    found = {}
    for name, parallel in LAYOUTS.items():
        config = mixed_run | {"parallel": parallel, "run_dir": str(tmp_path / name / "run")}
        warm_train(tmp_path / name, config, world_size=2 if parallel else 1)
        found[name] = metrics(config["run_dir"])
    alone = found.pop("one rank")
    assert alone[2]["source_tokens"]["text"] > alone[2]["source_tokens"]["numbers"]
    late = {name: alone[5]["source_tokens"][name] - alone[2]["source_tokens"][name] for name in ("text", "numbers")}
    assert late["numbers"] > 4 * late["text"], "the weights have changed"
    losses = alone[2]["evaluation_losses"]
    assert set(losses) == {"text", "numbers"} and losses["text"] != losses["numbers"]
    assert min(losses.values()) < alone[2]["evaluation_loss"] < max(losses.values())
    for record in alone:
        targets = record["source_targets"]
        sums = sum(loss * targets[name] for name, loss in record["source_losses"].items())
        assert sums / sum(targets.values()) == pytest.approx(record["loss"], rel=1e-6), record["step"]
    for name, records in found.items():
        for record, reference in zip(records, alone, strict=True):
            assert record["samples"] == reference["samples"] and record["source_epochs"] == reference["source_epochs"]
            assert record["loss"] == pytest.approx(reference["loss"], rel=1e-4), (name, record["step"])
            assert record["source_targets"] == reference["source_targets"], (name, record["step"])
            assert record["source_losses"] == pytest.approx(reference["source_losses"], rel=1e-4), (
                name,
                record["step"],
            )
            for of_set, loss in reference.get("evaluation_losses", {}).items():
                assert record["evaluation_losses"][of_set] == pytest.approx(loss, rel=1e-4), (name, of_set)


def test_a_restart_changes_the_future_alone(mixed_run: dict[str, Any], tmp_path: Path) -> None:
    """To the bit: a longer run begins like a shorter one, a resumed one goes on like one that was never stopped, and a
    stage that is added on the way changes what comes behind it."""
    one = partial(warm_train, world_size=1)
    runs = {name: mixed_run | {"run_dir": str(tmp_path / name / "run")} for name in ("short", "long", "changed")}
    one(tmp_path / "short", runs["short"], "training.steps=3")
    one(tmp_path / "short", runs["short"], "training.steps=12")
    one(tmp_path / "long", runs["long"], "training.steps=12")
    assert curve(runs["short"]) == curve(runs["long"]), "a run of 3 and 9 steps, and one of 12"
    one(tmp_path / "changed", runs["changed"])
    assert curve(runs["changed"]) == curve(runs["long"])[:6]
    changed = copy.deepcopy(runs["changed"])
    changed["data"]["stages"].append({"from_steps": 9, "weights": {"numbers": 0}})
    said = one(tmp_path / "changed", changed, "training.steps=12")
    assert "the stage from_steps 9 begins after step 9, at sample 36" in said
    assert curve(changed)[:9] == curve(runs["long"])[:9] and curve(changed)[9:] != curve(runs["long"])[9:]
    audit = AuditedRun.open(Path(changed["run_dir"]))
    assert {content.source for step in (10, 11, 12) for content in audit.contents(audit.samples_of(step))} == {"text"}
    for step in (2, 8, 12):
        for content in audit.contents(audit.samples_of(step)):
            one_of_them = content.documents[0]
            found = audit.readings(f"{one_of_them.prefix}:{one_of_them.first}")
            assert (content.k, step) in [(reading.k, reading.step) for reading in found]
