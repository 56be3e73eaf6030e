"""A run follows its mix from wherever it starts: stages begin where the config says, and the past never changes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_pipeline.errors import DataError
from data_pipeline.samples.mix import MixedSamples
from data_pipeline.storage.indexed_writer import IndexedWriter
from launch.trainer.data.opening import RunData, open_data
from launch.trainer.data.run_mix import DataPosition
from launch.trainer.start.resume import _check_data
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config, ConfigError
from megalite.config.rules.rules import check_rules

BATCH, LENGTH = 4, 32  # of the config `tiny`
SAMPLES = {"code": 60, "maths": 10, "web": 100}


@pytest.fixture
def mixed_config(tiny: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A run of 30 steps on three sources, of the numbers of samples above."""
    sources: dict[str, Any] = {}
    for name, weight in (("web", 0.7), ("code", 0.2), ("maths", 0.1)):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for number in range(SAMPLES[name]):
                ids = np.full(LENGTH, number % 50 + 1, dtype=np.uint16)
                writer.append(ids, np.array([LENGTH]))
        sources[name] = {"path": str(tmp_path / name), "weight": weight}
    tiny["data"] = {"sources": sources, "held_out_fraction": 0}
    tiny["training"]["steps"] = 30
    return tiny


def opened(config: dict[str, Any], followed: DataPosition | None = None) -> RunData:
    loaded = Config.model_validate(config)
    check_rules(loaded, None, None)
    followed = followed or DataPosition()
    return open_data(loaded).from_position(loaded, followed)


def mix_of(data: RunData) -> MixedSamples:
    assert isinstance(data.training, MixedSamples)
    return data.training


def changed(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for name, value in options.items():
        config["data" if name in ("stages", "sources", "validation") else "training"][name] = value
    return config


def saved(data: RunData, step: int, consumed: int | None = None) -> DataPosition:
    """What a checkpoint of a run on `data` says, through JSON's types."""
    return DataPosition.of(state_of(data, step, consumed))


def state_of(data: RunData, step: int, consumed: int | None = None) -> dict[str, Any]:
    consumed = step * BATCH if consumed is None else consumed
    return {
        "step": step, "consumed_samples": consumed, "seed": 0,
        "data_fingerprint": data.training.fingerprint, "data_mix": data.mix_facts,
    }  # fmt: skip


def resume(config: dict[str, Any], state: dict[str, Any], before: dict[str, Any] | None = None) -> RunData:
    """Checks and goes on from a checkpoint as a start does; `before` is the config in the checkpoint."""
    loaded = Config.model_validate(config)
    check_rules(loaded, None, None)
    data = open_data(loaded)
    manifest = Manifest(step=state["step"], config=before or {}, tokenizer=None, state=state, tensors={}, files={})
    _check_data(manifest, loaded, Path("step_1"), data.training)
    return data.from_position(loaded, DataPosition.of(state))


@pytest.mark.parametrize(
    ("stage", "first"),
    [
        ({"from_tokens": 0}, None),
        ({"from_tokens": 1}, 4),
        ({"from_tokens": 8 * LENGTH}, 8),
        ({"from_tokens": 8 * LENGTH + 1}, 12),
        ({"from_steps": 3}, 12),
    ],
)
def test_a_stage_begins_with_the_first_step_at_its_place(
    mixed_config: dict[str, Any], stage: dict[str, int], first: int | None
) -> None:
    data = opened(changed(mixed_config, stages=[stage | {"weights": {"maths": 0.3}}]))
    stages = mix_of(data).mix.stages
    assert [one.first_sample for one in stages] == ([0] if first is None else [0, first])
    assert stages[-1].weights == {"web": 0.7, "code": 0.2, "maths": 0.3}, "a source that is not named keeps its weight"
    if first is not None:
        assert f"begins after step {first // BATCH}, at sample {first} (token {first * LENGTH})" in data.notices[0]


def test_a_stage_in_the_future_may_be_added_and_taken_back(mixed_config: dict[str, Any]) -> None:
    """T4: the samples read so far are the same, and a new source is read from its stage on."""
    first = opened(mixed_config)
    added = changed(mixed_config, stages=[{"from_steps": 10, "weights": {"web": 0, "maths": 0.8}}])
    added["data"]["sources"]["new"] = added["data"]["sources"]["web"] | {"weight": 0}
    added["data"]["stages"][0]["weights"]["new"] = 1
    second = resume(added, state_of(first, 10))
    assert mix_of(second).record.first_difference(mix_of(first).record, 40) is None
    assert "new" in {mix_of(second).mix.names[source] for source, _ in mix_of(second).mix.places(40, 80)}
    later = changed(added, stages=[added["data"]["stages"][0], {"from_steps": 20, "weights": {"web": 5}}])
    third = resume(later, state_of(second, 15))
    assert [stage.first_sample for stage in mix_of(third).mix.stages] == [0, 40, 80]
    assert [stage.first_sample for stage in mix_of(resume(added, state_of(third, 15))).mix.stages] == [0, 40]


def test_another_past_is_refused_with_the_first_sample_that_differs(mixed_config: dict[str, Any]) -> None:
    first = opened(mixed_config)
    swapped = changed(mixed_config)
    for name, weight in (("web", 0.2), ("code", 0.7)):
        swapped["data"]["sources"][name]["weight"] = weight
    k = mix_of(first).record.first_difference(mix_of(opened(swapped)).record, 40)
    assert k is not None
    with pytest.raises(
        CheckpointError, match=rf"^step_1 has read 40 samples .*: sample {k} \(token {k * LENGTH}\) came"
    ):
        resume(swapped, state_of(first, 10))
    late = changed(mixed_config, stages=[{"from_steps": 9, "weights": {"web": 0}}])
    with pytest.raises(
        CheckpointError, match=r"sample 3\d .* came from \w+, and this config reads (code|maths) there;"
    ):
        resume(late, state_of(first, 10))
    other = changed(mixed_config)
    other["data"]["sources"]["web"]["path"] = other["data"]["sources"]["code"]["path"]
    with pytest.raises(CheckpointError, match="web holds something else now"):
        resume(other, state_of(first, 10))
    with pytest.raises(CheckpointError, match=r"training.seed 0, this config has 5"):
        resume(changed(mixed_config, seed=5), state_of(first, 10))


def test_one_text_may_become_a_source(mixed_config: dict[str, Any]) -> None:
    """`data.path` has kept a fingerprint alone; its past is the mix of one source."""
    alone = changed(mixed_config)
    web = alone["data"].pop("sources")["web"]["path"]
    alone["data"]["path"] = web
    first = opened(alone)
    assert first.mix_facts == {}
    stages = [{"from_steps": 10, "weights": {"code": 1}}]
    more = changed(mixed_config, stages=stages)
    for name, source in more["data"]["sources"].items():
        source["weight"] = 1 if name == "web" else 0
    second = resume(more, state_of(first, 10))
    for k in (0, 7, 39):
        assert np.array_equal(second.training.sample(k).tokens, first.training.sample(k).tokens)
    with pytest.raises(CheckpointError, match=r"sample 4\d .* came from code, and this config reads data.path there"):
        resume(alone, state_of(second, 20))
    resume(alone, state_of(second, 10))
    with pytest.raises(CheckpointError, match="was trained on other data"):
        resume(alone | {"data": {"path": more["data"]["sources"]["code"]["path"]}}, state_of(first, 10))


def test_one_text_may_become_one_of_two_sources_that_hold_it(mixed_config: dict[str, Any]) -> None:
    """Whichever of the two is read goes on; what the other one reads later is another sample."""
    alone = changed(mixed_config)
    web = alone["data"].pop("sources")["web"]
    alone["data"]["path"] = web["path"]
    first = opened(alone)
    for name in ("again", "zebra"):  # one before and one behind it
        config = changed(mixed_config, stages=[{"from_steps": 10, "weights": {"web": 0, name: 1}}])
        config["data"]["sources"] = {"web": web | {"weight": 1}, name: web | {"weight": 0}}
        second = resume(config, state_of(first, 10))
        with pytest.raises(CheckpointError, match="sample 40 "):
            resume(alone, state_of(second, 12))


def test_other_tokens_in_documents_of_the_same_lengths_are_refused(mixed_config: dict[str, Any]) -> None:
    """Without metadata the fingerprint knows lengths alone, and so does a checkpoint of an older version."""
    alone = changed(mixed_config)
    web = Path(alone["data"].pop("sources")["web"]["path"])
    alone["data"]["path"] = str(web)
    first = opened(alone)
    tokens = web.with_name(f"{web.name}.bin")
    tokens.write_bytes(tokens.read_bytes()[::-1])
    older = state_of(first, 10)
    resume(alone, older)
    with pytest.raises(CheckpointError, match="was trained on other tokens than"):
        resume(alone, older | {"data_content": first.training.content_digest})
    with pytest.raises(CheckpointError, match="web holds something else now"):
        mixed = changed(mixed_config)
        resume(mixed, state_of(opened(mixed), 10) | {"data_mix": renamed(opened(mixed).mix_facts)})


def renamed(facts: dict[str, Any]) -> dict[str, Any]:
    """The record of a mix whose source `web` had another digest of tokens."""
    return facts | {"sources": facts["sources"] | {"web": facts["sources"]["web"].partition("+")[0] + "+other"}}


def test_another_batch_size_moves_no_stage_that_has_begun(mixed_config: dict[str, Any]) -> None:
    """And one in the future begins with a step of the new size, at its place."""
    stages = [{"from_tokens": 5 * LENGTH, "weights": {"web": 0}}, {"from_steps": 20, "weights": {"code": 0}}]
    config = changed(mixed_config, stages=stages)
    first = opened(config)
    assert [stage.first_sample for stage in mix_of(first).mix.stages] == [0, 8, 80]
    larger = changed(config, global_batch_size=6, steps=40)
    second = resume(larger, state_of(first, 10))
    assert [stage.first_sample for stage in mix_of(second).mix.stages] == [0, 8, 40 + 10 * 6]
    # a rollback has left out samples since: the same batch size moves nothing at all
    third = resume(config, state_of(first, 10, consumed=48))
    assert [stage.first_sample for stage in mix_of(third).mix.stages] == [0, 8, 80]


def test_weights_and_batches_change_in_stages_of_their_own(mixed_config: dict[str, Any]) -> None:
    """Weights change with the first step at their place, however many samples the steps before it have taken, and a
    change of the batches to come moves no weights in the past."""
    stages = [{"from_tokens": 60 * LENGTH, "weights": {"web": 0}}, {"from_steps": 15, "weights": {"code": 0}}]
    config = changed(mixed_config, stages=stages)
    config["training"]["stages"] = [{"from_steps": 10, "global_batch_size": 8}]
    first = opened(config)
    assert [stage.first_sample for stage in mix_of(first).mix.stages] == [0, 40 + 3 * 8, 40 + 5 * 8]
    assert "the stage from_steps 15 begins after step 15, at sample 80" in first.notices[1]
    state = state_of(first, 14, consumed=40 + 4 * 8) | {"tokens_seen": 72 * LENGTH}
    before = copy.deepcopy(config)
    assert mix_of(resume(config, state, before)).mix == mix_of(first).mix
    config["training"]["stages"].append({"from_steps": 14, "global_batch_size": 4})
    second = resume(config, state, before)
    assert [stage.first_sample for stage in mix_of(second).mix.stages] == [0, 64, 72 + 4]
    config["training"]["stages"][1] = {"from_steps": 14, "global_batch_size": 8, "sequence_length": LENGTH // 2}
    assert mix_of(resume(config, state, before)).mix == mix_of(second).mix, "8 sequences are 4 samples"


def test_other_micro_batches_in_stages_move_no_weights(mixed_config: dict[str, Any]) -> None:
    """After a rollback a stage of weights stays at its sample, however the batches are cut: results do not depend on
    it."""
    config = changed(mixed_config, stages=[{"from_steps": 20, "weights": {"code": 0}}])
    batch: dict[str, Any] = {"from_steps": 12, "global_batch_size": 8}
    config["training"]["stages"] = [batch]
    first = opened(config)
    assert [stage.first_sample for stage in mix_of(first).mix.stages] == [0, 12 * 4 + 8 * 8]
    state = state_of(first, 10, consumed=48) | {"tokens_seen": 40 * LENGTH}
    before = copy.deepcopy(config)
    for stages in ([batch | {"micro_batch_size": 1}], [{"from_steps": 11, "micro_batch_size": 1}, batch]):
        config["training"]["stages"] = stages
        assert mix_of(resume(config, state, before)).mix == mix_of(first).mix, stages


def test_another_batch_size_moves_no_stage_that_another_one_has_replaced(mixed_config: dict[str, Any]) -> None:
    """Three stages of which two fall into one step: with smaller steps none of them begins anew in the past."""
    places = [{"from_tokens": tokens * LENGTH, "weights": {name: 0}} for tokens, name in ((0, "code"), (5, "web"))]
    config = changed(mixed_config, stages=[*places, {"from_tokens": 7 * LENGTH, "weights": {"maths": 0}}])
    first = opened(config)
    assert [(stage.first_sample, len(stage.replaced)) for stage in mix_of(first).mix.stages] == [(0, 0), (8, 1)]
    smaller = changed(config, global_batch_size=2, micro_batch_size=2)
    second = resume(smaller, json.loads(json.dumps(state_of(first, 10))))
    assert mix_of(second).mix == mix_of(first).mix
    assert mix_of(resume(smaller, state_of(second, 12, consumed=44))).mix == mix_of(first).mix


def test_a_source_is_not_read_more_often_than_it_may(mixed_config: dict[str, Any]) -> None:
    """I4: with the numbers and a weight that works, before a rank starts."""
    mixed_config["data"]["sources"]["maths"]["max_epochs"] = 2
    opened(mixed_config)  # 120 samples, of which maths gives 12 of at most 20
    mixed_config["training"]["steps"] = 120
    with pytest.raises(DataError) as refused:
        opened(mixed_config)
    text = str(refused.value)
    assert "maths is read 4.8 times by token 15,360, the end of the run" in text and "max_epochs is 2" in text
    weight = re.search(r"lower its weight to ([0-9.]+) in the stage at the start, or raise max_epochs$", text)
    assert weight is not None, text
    mixed_config["data"]["sources"]["maths"]["weight"] = float(weight[1])
    opened(mixed_config)


@pytest.mark.parametrize("steps", [9, 14, 23, 40])
@pytest.mark.parametrize("weight", [0.1, 0.5, 3])
def test_a_weight_that_is_advised_is_accepted(mixed_config: dict[str, Any], steps: int, weight: float) -> None:
    """The counts of a mix are a few samples off their shares, which are many of a small source."""
    config = changed(mixed_config, steps=steps)
    config["data"]["sources"]["maths"] |= {"weight": weight, "max_epochs": 0.3}
    advised = re.search(r"lower its weight to ([0-9.e-]+) in the stage at the start", refusal(config))
    if advised is None:
        return  # few steps and a low weight
    config["data"]["sources"]["maths"]["weight"] = float(advised[1])
    opened(config)


@pytest.mark.parametrize("left_out", [[], [[8, 16]]])
def test_the_advice_to_a_run_under_way_leaves_its_past_as_it_is(
    mixed_config: dict[str, Any], left_out: list[list[int]]
) -> None:
    """A stage that has begun keeps its weights; the advised one begins where the run stands, and is accepted."""
    mixed_config["data"]["sources"]["maths"]["max_epochs"] = 1
    first = opened(changed(mixed_config, steps=20))
    state = state_of(first, 10, consumed=40 + sum(stop - first for first, stop in left_out))
    state["excluded_samples"] = left_out
    longer = changed(mixed_config, steps=40)
    with pytest.raises(DataError) as refused:
        resume(longer, state)
    advised = re.search(r"add the stage ({.*}) to data.stages, or raise max_epochs$", str(refused.value))
    assert advised is not None, refused.value
    resume(changed(longer, stages=[yaml.safe_load(advised[1])]), state)


def test_other_epochs_of_a_run_under_way_are_final(mixed_config: dict[str, Any]) -> None:
    """The sentence about a run that is too long must not advise what the next one refuses."""
    for source in mixed_config["data"]["sources"].values():
        del source["weight"]
        source["epochs"] = 1
    first = opened(changed(mixed_config, steps=42))
    assert "or raise epochs" in refusal(changed(mixed_config, steps=50))
    with pytest.raises(DataError, match=r"set training.steps to 43; epochs of several sources are final once"):
        resume(changed(mixed_config, steps=50), state_of(first, 10))
    mixed_config["data"]["sources"]["maths"]["epochs"] = 2
    with pytest.raises(CheckpointError, match=r"with other epochs, and .* final .*: set them back, or start another"):
        resume(changed(mixed_config, steps=42), state_of(first, 10))


def test_epochs_of_sources_are_the_length_of_the_run(mixed_config: dict[str, Any]) -> None:
    for name, epochs in (("web", 0.5), ("code", 1), ("maths", 3)):
        source = mixed_config["data"]["sources"][name]
        del source["weight"]
        source["epochs"] = epochs
    data = opened(changed(mixed_config, steps=35))
    assert mix_of(data).mix.counts(140) == [60, 30, 50]
    assert "the run ends when 86% of the epochs of data.sources are read" in opened(mixed_config).notices
    with pytest.raises(
        DataError, match=r"takes 36 steps, .* come to 140 samples, .* 35 steps of 4: set training.steps"
    ):
        opened(changed(mixed_config, steps=36))


@pytest.mark.parametrize("kind", ["epochs", "max_epochs"])
def test_a_rollback_does_not_keep_a_run_of_epochs_from_going_on(mixed_config: dict[str, Any], kind: str) -> None:
    """What was allowed to start may be restarted; that it reads some samples more is a notice."""
    sources, steps = mixed_config["data"]["sources"], 35
    if kind == "epochs":
        for name, epochs in (("web", 0.5), ("code", 1), ("maths", 3)):
            del sources[name]["weight"]
            sources[name]["epochs"] = epochs
    else:  # as many steps as these weights allow; the samples left out are none of maths
        sources["maths"] |= {"weight": 0, "max_epochs": 3}
        mixed_config["data"]["stages"] = [{"from_steps": 12, "weights": {"maths": 1}}]
        steps = next(n for n in range(35, 0, -1) if not refusal(changed(mixed_config, steps=n)))
    config = changed(mixed_config, steps=steps)
    first = opened(config)
    state = state_of(first, 6, consumed=40) | {"excluded_samples": [[16, 24], [28, 36]]}
    second = resume(config, state)
    assert any("rollbacks have left out 16 samples, in whose place later ones" in one for one in second.notices)
    with pytest.raises(DataError):
        resume(changed(config, steps=steps + 1), state)


def refusal(config: dict[str, Any]) -> str:
    """The sentence that refuses a new run, or ""."""
    try:
        opened(config)
    except DataError as error:
        return str(error)
    return ""


def test_a_last_step_beyond_the_epochs_is_noticed(mixed_config: dict[str, Any]) -> None:
    for name, epochs in (("web", 0.5), ("code", 1), ("maths", 3)):
        del mixed_config["data"]["sources"][name]["weight"]
        mixed_config["data"]["sources"][name]["epochs"] = epochs
    mixed_config["data"]["sources"]["web"]["epochs"] = 0.51
    said = "the run reads 3 samples more than the epochs of data.sources: 141 is no multiple of a batch of 4"
    assert said in opened(changed(mixed_config, steps=36)).notices
    assert not any("more than the epochs" in one for one in opened(changed(mixed_config, steps=35)).notices)


def test_validation_sets_have_names_and_sizes(mixed_config: dict[str, Any], tmp_path: Path) -> None:
    mixed_config["data"]["held_out_fraction"] = 0.5
    mixed_config["training"]["evaluation"] = {"interval": 2, "samples": 8}
    sets = opened(mixed_config).validation
    assert [(one.name, one.samples.split, one.count) for one in sets] == [
        (name, "held_out", 8) for name in ("web", "code", "maths")
    ]
    chosen = {"texts": {"path": str(tmp_path / "code"), "samples": 4}, "held": {"source": "web"}}
    texts, held = opened(changed(mixed_config, validation=chosen)).validation
    assert (texts.count, texts.samples.token_count) == (4, SAMPLES["code"] * LENGTH), "all documents of other text"
    assert (held.count, held.samples.split) == (8, "held_out")


def test_the_same_text_and_small_sources_are_noticed(mixed_config: dict[str, Any], tmp_path: Path) -> None:
    """Documents of the same lengths are not the same text."""
    with IndexedWriter(tmp_path / "other", np.uint16) as writer:
        for _ in range(SAMPLES["web"]):
            writer.append(np.full(LENGTH, 7, dtype=np.uint16), np.array([LENGTH]))
    mixed_config["data"]["sources"] |= {
        "again": mixed_config["data"]["sources"]["web"],
        "other": {"path": str(tmp_path / "other"), "weight": 1},
    }
    mixed_config["training"]["global_batch_size"] = 16
    notices = opened(mixed_config).notices
    (same,) = [notice for notice in notices if "hold the same text" in notice]
    assert same == "again and web of data.sources hold the same text, which is read for each of them"
    assert "maths of data.sources has 10 samples, less than one batch of 16" in notices


MISTAKES = {
    "both": ({"path": "a"}, "data.path and data.sources both name"),
    "stage of nothing": ({"sources": {}, "path": "a", "stages": [{"from_steps": 1}]}, "and there are none"),
    "unknown source": ({"stages": [{"from_steps": 1, "weights": {"wbe": 1}}]}, "did you mean web?"),
    "no place": ({"stages": [{"weights": {"web": 1}}]}, "stage 0 of data.stages has neither of from_tokens"),
    "two places": ({"stages": [{"from_steps": 1, "from_tokens": 1}]}, "has both of from_tokens and from_steps"),
    "not rising": ({"stages": [{"from_steps": 2}, {"from_tokens": 256}]}, "begins at token 256, not after stage 0"),
    "no weight": ({"sources": {"web": {"path": "a"}}}, "data.sources.web.weight is missing, and so are epochs"),
    "two kinds": (
        {"sources": {"web": {"path": "a", "weight": 1}, "code": {"path": "b", "epochs": 1}}},
        "data.sources.code has epochs and data.sources.web has a weight",
    ),
    "all 0": ({"sources": {"web": {"path": "a", "weight": 0}}}, "data.sources all have weight 0"),
    "all 0 in a stage": (
        {"stages": [{"from_steps": 1, "weights": {"web": 0, "code": 0, "maths": 0}}]},
        "all sources have weight 0 in stage 0",
    ),
    "no set": ({"validation": {"a": {}}}, "data.validation.a needs one of source and path"),
    "unknown set": ({"validation": {"a": {"source": "wbe"}}}, "did you mean web?"),
    "uneven set": ({"validation": {"a": {"source": "web", "samples": 3}}}, "samples 3 is not a multiple of"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mix_that_cannot_be_is_one_sentence(mixed_config: dict[str, Any], name: str) -> None:
    data, sentence = MISTAKES[name]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        opened(mixed_config | {"data": mixed_config["data"] | data})
