"""`megalite data plan`, `at` and `find`, on the folder of a run that was rolled back once and skipped a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data_pipeline.samples.mix import MixedSamples
from launch.cli.app import app
from launch.errors import LaunchError
from launch.trainer.data.opening import open_training
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import MANIFEST, Manifest
from megalite.config import Config
from tests.conftest import write_config

DONE = {1: (0, 4), 2: (4, 8), 3: (16, 20), 4: (20, 24)}  # samples 8 to 15 were left out by a rollback
SKIPPED, STEPS, BATCH = 4, 40, 4


@pytest.fixture
def run_dir(tiny: dict[str, Any], tmp_path: Path) -> Path:
    corpus = tiny["data"].pop("path")
    tiny["data"]["sources"] = {"most": {"path": corpus, "weight": 3}, "rest": {"path": [corpus], "weight": 1}}
    tiny["data"]["stages"] = [{"from_steps": 30, "weights": {"rest": 9}}]
    tiny["training"]["steps"] = STEPS
    folder = Path(tiny["run_dir"])
    folder.mkdir()
    write_config(folder / "config.yaml", tiny)
    (folder / "receipt.json").write_text("{}")
    records = [{"step": step, "samples": samples, "skipped": step == SKIPPED} for step, samples in DONE.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def said(*words: str | Path) -> Any:
    done = CliRunner().invoke(app, ["data", *map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def config_of(run_dir: Path) -> Config:
    import yaml

    return Config.model_validate(yaml.safe_load((run_dir / "config.yaml").read_text()))


def test_the_plan_and_the_steps_to_come_follow_the_stages_of_training(run_dir: Path) -> None:
    """After 4 steps of 4 sequences of 32 tokens: 16 steps more of them, then 20 of 4 sequences of 64 tokens, a sample
    each; of the shorter ones two make a sample."""
    text = (run_dir / "config.yaml").read_text()
    stages = "stages: [{from_steps: 20, sequence_length: 64}]"
    (run_dir / "config.yaml").write_text(text.replace("sequence_length: 32", f"sequence_length: 32\n  {stages}"))
    plan = said("plan", run_dir / "config.yaml")
    assert plan["samples"] == 20 * 2 + 20 * 4 == sum(row["samples"] for row in plan["stages"])
    assert [row["first_step"] for row in plan["stages"]] == [0, 0, 30, 30]
    assert plan["stages"][2]["first_sample"] == 20 * 2 + 10 * 4
    assert plan["batch_stages"] == [
        {
            **{"place": "from_steps 20", "after_step": 20, "from_token": 20 * 4 * 32},
            **{"global_batch_size": 4, "sequence_length": 64, "micro_batch_size": 2, "is_reached": True},
        }
    ]
    shown = CliRunner().invoke(app, ["data", "plan", str(run_dir / "config.yaml")])
    assert (
        "from the stage from_steps 20, after step 20 (token 2,560), on: 4 sequences x 64 tokens = 256" in shown.output
    )
    known = {step: said("at", run_dir, "--step", str(step))["samples"] for step in (5, 20, 21, 40)}
    bounds = {step: (samples[0]["sample"], samples[-1]["sample"] + 1) for step, samples in known.items()}
    assert bounds == {5: (24, 26), 20: (24 + 15 * 2, 24 + 16 * 2), 21: (56, 60), 40: (56 + 19 * 4, 56 + 20 * 4)}
    for step in (5, 21, 40):
        document = known[step][0]["documents"][0]
        found = said("find", run_dir, "--document", f"{document['prefix']}:{document['first']}")["samples"]
        assert (bounds[step][0], step) in [(one["k"], one["step"]) for one in found]


def test_the_plan_adds_up_to_the_run(run_dir: Path) -> None:
    plan = said("plan", run_dir / "config.yaml")
    assert plan["samples"] == STEPS * BATCH == sum(row["samples"] for row in plan["stages"])
    assert [(row["stage"], row["source"], row["first_step"]) for row in plan["stages"]] == [
        (0, "most", 0), (0, "rest", 0), (1, "most", 30), (1, "rest", 30),
    ]  # fmt: skip
    assert [round(row["share"], 2) for row in plan["stages"]] == [0.75, 0.25, 0.25, 0.75]
    assert any("begins after step 30, at sample 120" in notice for notice in plan["notices"])
    shown = CliRunner().invoke(app, ["data", "plan", str(run_dir / "config.yaml")])
    assert shown.exit_code == 0 and "most" in shown.stdout and "epochs at its end" in shown.stdout


def test_what_each_step_reads_is_what_training_reads(run_dir: Path) -> None:
    samples = open_training(config_of(run_dir))
    for step, (first, when) in {2: (4, "read"), 4: (20, "skipped"), 5: (24, "to come"), 40: (164, "to come")}.items():
        found = said("at", run_dir, "--step", str(step))
        assert found["when"] == when and [one["sample"] for one in found["samples"]] == list(
            range(first, first + BATCH)
        )
        for one in found["samples"]:
            assert [document["first"] for document in one["documents"]] == [
                document.first for document in samples.documents(one["sample"])
            ]


def test_every_reading_of_a_document_has_its_step(run_dir: Path) -> None:
    samples = open_training(config_of(run_dir))
    document = samples.documents(9)[0]  # of a sample that no step has kept
    found = said("find", run_dir, "--document", f"{document.prefix}:{document.first}")["samples"]
    stop = 24 + (STEPS - 4) * BATCH
    expected = [
        k for k in range(stop)
        if any(one.first <= document.first <= one.last for one in samples.documents(k))
    ]  # fmt: skip
    assert [one["k"] for one in found] == expected and 9 in expected
    for one in found:
        step = next((step for step, (first, end) in DONE.items() if first <= one["k"] < end), None)
        if one["k"] >= 24:
            assert (one["step"], one["when"]) == (5 + (one["k"] - 24) // BATCH, "to come")
        elif step is None:
            assert (one["step"], one["when"]) == (None, "left out")
        else:
            assert (one["step"], one["when"]) == (step, "skipped" if step == SKIPPED else "read")


def save(run_dir: Path, **state: Any) -> Path:
    """Leaves a checkpoint of a run at its step; returns its manifest."""
    folder = run_dir / "checkpoints" / f"step_{state['step']:08d}"
    folder.mkdir(parents=True)
    training = open_training(config_of(run_dir))
    assert isinstance(training, MixedSamples)
    known = {"data_fingerprint": training.fingerprint, "data_mix": training.record.facts()}
    manifest = Manifest(step=state["step"], config={}, tokenizer=None, state=known | state, tensors={}, files={})
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return folder / MANIFEST


def test_the_reasons_why_no_step_reads_a_document_are_those_of_the_config(run_dir: Path) -> None:
    settings = config_of(run_dir).model_dump(mode="json")
    settings["data"] |= {"too_long": "skip", "packing": "best_fit", "document_mask": True, "held_out_fraction": 0.5}
    write_config(run_dir / "config.yaml", settings)
    CliRunner().invoke(app, ["data", "pack", str(run_dir / "config.yaml")], catch_exceptions=False)
    corpus = config_of(run_dir).data.prefixes[0]
    held_out = next(n for n in range(99) if not said("find", run_dir, "--document", f"{corpus}:{n}")["samples"])
    shown = CliRunner().invoke(app, ["data", "find", str(run_dir), "--document", f"{corpus}:{held_out}"])
    assert "it is held out, empty, left out by data.too_long skip, or comes after the end of the run" in shown.output


def test_samples_of_steps_without_records_are_not_called_undone(run_dir: Path) -> None:
    """A rollback is what the checkpoint says, or two steps in a row without samples in between."""
    samples = open_training(config_of(run_dir))
    documents = [samples.documents(k)[0] for k in (1, 9, 17)]

    def when() -> dict[int, str]:
        words = [("find", run_dir, "--document", f"{one.prefix}:{one.first}") for one in documents]
        return {one["k"]: one["when"] for each in words for one in said(*each)["samples"] if one["k"] < 20}

    save(run_dir, step=4, consumed_samples=24, excluded_samples=[[8, 16]])
    all_told = {k: "left out" if 8 <= k < 16 else "read" for k in when()}
    assert when() == all_told and {1, 9, 17} <= all_told.keys()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text(lines[3])
    assert when() == {k: "unknown" if meaning == "read" else meaning for k, meaning in all_told.items()}
    (run_dir / "metrics.jsonl").unlink()
    assert when() == {k: "unknown" if meaning == "read" else meaning for k, meaning in all_told.items()}


def test_a_run_that_was_moved_is_audited_where_it_lies(run_dir: Path, tmp_path: Path) -> None:
    """Its config still names the old folder; what it has read is in its own checkpoints."""
    assert "holds no checkpoint to compare with" in said("at", run_dir, "--step", "1")["notice"]
    moved = run_dir.rename(tmp_path / "moved")
    manifest = save(moved, step=4, consumed_samples=24)
    assert said("at", moved, "--step", "1")["notice"] is None
    settings = config_of(moved).model_dump(mode="json")
    settings["data"]["sources"]["rest"]["weight"] = 9
    write_config(moved / "config.yaml", settings)
    with pytest.raises(CheckpointError, match="has read 24 samples of another mix"):
        said("at", moved, "--step", "1")
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="holds no checkpoint that can be used, the newest because of this"):
        said("at", moved, "--step", "1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["at", "--step", "41"], "--step 41: the run has steps 1 to 40"),
        (["at", "--step", "1", "--text"], "so that ids cannot be turned into text"),
        (["find", "--document", "most"], "give SOURCE:NUMBER or PREFIX:NUMBER"),
        (["find", "--document", "least:3"], "the run reads no least, but most, rest"),
    ],
)
def test_what_a_run_does_not_have_is_one_sentence(run_dir: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        CliRunner().invoke(app, ["data", words[0], str(run_dir), *words[1:]], catch_exceptions=False)


def test_documents_of_data_at_a_url_have_its_name(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a copy, which is another one on each host, and which `find` would not take on another."""
    here = said("at", run_dir, "--step", 2)
    config = config_of(run_dir).model_dump(mode="json")
    corpus = config["data"]["sources"]["most"]["path"][0]
    number = here["samples"][0]["documents"][0]["first"]
    found = said("find", run_dir, "--document", f"{corpus}:{number}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for source in config["data"]["sources"].values():
        source["path"] = [f"file://{corpus}"]
    write_config(run_dir / "config.yaml", config)
    assert CliRunner().invoke(app, ["data", "fetch", str(run_dir / "config.yaml")]).exit_code == 0
    there = said("at", run_dir, "--step", 2)
    assert json.dumps(there).replace("file://", "") == json.dumps(here) and "file://" in json.dumps(there)
    assert said("find", run_dir, "--document", f"file://{corpus}:{number}")["samples"] == found["samples"] != []
