"""A resume says what changed since its checkpoint, and refuses what would change its meaning."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.trainer.start.config_changes import (
    NEEDS_PERMISSION,
    OptionChange,
    changes_since,
    check_changes,
    learning_rate_jump,
)
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config
from megalite.config.suggestions import dotted, option_paths


def manifest_of(config: dict[str, Any]) -> Manifest:
    return Manifest(step=20, config=config, tokenizer=None, state={}, tensors={}, files={})


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    saved = Config.model_validate(before).model_dump(mode="json")
    return [str(change) for change in changes_since(manifest_of(saved), Config.model_validate(after))]


def changed(config: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    other = copy.deepcopy(config)
    for name, values in sections.items():
        other[name] = other.get(name, {}) | values
    return other


def test_a_longer_run_of_a_schedule_that_falls_says_what_becomes_of_the_learning_rate(tiny: dict[str, Any]) -> None:
    """After 20 steps of 20 the rate is at its minimum; of a run of 40 it is in the middle."""
    cosine = {"name": "cosine", "warmup_steps": 0, "min_learning_rate_ratio": 0.1}
    tiny = changed(tiny, schedule=cosine, training={"steps": 20}, optimizer={"learning_rate": 1e-3})

    def jump(**sections: dict[str, Any]) -> tuple[float, float] | None:
        saved = manifest_of(Config.model_validate(tiny).model_dump(mode="json"))
        return learning_rate_jump(saved, Config.model_validate(changed(tiny, **sections)))

    assert jump() is None
    before, after = jump(training={"steps": 40}) or (0.0, 0.0)
    assert before == pytest.approx(1e-4) and 4e-4 < after < 6e-4
    assert jump(training={"steps": 40}, optimizer={"learning_rate": 2e-4}) is None
    scaled = {"scale_with_batch": "linear", "reference_batch_size": 2}
    before, doubled = jump(training={"steps": 40}, optimizer={"learning_rate": 1e-3} | scaled) or (0.0, 0.0)
    assert before == pytest.approx(1e-4) and doubled == pytest.approx(2 * after), "with a batch of 4"


def test_what_changed_is_listed_with_before_and_after(tiny: dict[str, Any]) -> None:
    assert changes(tiny, tiny) == []
    after = changed(
        tiny,
        optimizer={"learning_rate": 3e-3, "weight_decay": 0.5},
        precision={"dtype": "bf16"},
        training={"steps": 24},
        deepspeed={"steps_per_print": 5},
    )
    assert changes(tiny, after) == [
        "precision.dtype 'fp32' -> 'bf16'",
        "optimizer.learning_rate 0.0003 -> 0.003",
        "optimizer.weight_decay 0.1 -> 0.5",
        "training.steps 4 -> 24",
        "deepspeed.steps_per_print null -> 5",
    ]


def test_what_concerns_no_training_is_not_listed(tiny: dict[str, Any]) -> None:
    after = changed(tiny, monitor={"log_interval": 7}, launch={"threads_per_rank": 3}, training={"max_minutes": 5})
    assert changes(tiny, after | {"run_dir": "elsewhere"}) == []
    sgd = changed(tiny, optimizer={"name": "sgd"})
    assert changes(sgd, changed(sgd, optimizer={"betas": [0.5, 0.5], "eps": 1e-3})) == [], "sgd has no moments"


def test_an_option_that_a_checkpoint_does_not_name_had_its_default(tiny: dict[str, Any]) -> None:
    old = Config.model_validate(tiny).model_dump(mode="json")
    del old["optimizer"]["weight_decay"], old["data"]["document_mask"], old["guards"], old["model"]["head_dim"]
    assert changes_since(manifest_of(old), Config.model_validate(tiny)) == ()
    after = changed(tiny, optimizer={"weight_decay": 0.5}, data={"document_mask": True})
    found = changes_since(manifest_of(old), Config.model_validate(after))
    assert found == (OptionChange("data.document_mask", False, True), OptionChange("optimizer.weight_decay", 0.1, 0.5))


def test_defaults_that_have_changed_since_are_those_of_their_time(tiny: dict[str, Any]) -> None:
    """Once nothing was saved before the end, and bf16 gradients were summed in bf16."""
    config = Config.model_validate(changed(tiny, precision={"dtype": "bf16"}))
    old = config.model_dump(mode="json")
    del old["checkpoint"]["interval"], old["precision"]["gradient_reduction_dtype"]
    assert [str(change) for change in changes_since(manifest_of(old), config)] == [
        "precision.gradient_reduction_dtype 'bf16' -> 'fp32'",
        "checkpoint.interval 0 -> 'auto'",
    ]


def test_a_checkpoint_without_a_whole_config_names_nothing_that_is_not_known(tiny: dict[str, Any]) -> None:
    """Nothing is said of options that have no default, such as the batch size; of others, what they had."""
    config = Config.model_validate(changed(tiny, checkpoint={"interval": 0}))
    saved = manifest_of({"model": config.model_dump(mode="json")["model"]})
    assert [str(change) for change in changes_since(saved, config) if not change.option.startswith("training.")] == [
        "data.held_out_fraction 0.01 -> 0.3",
        "precision.dtype 'bf16' -> 'fp32'",
    ]


@pytest.mark.parametrize("option", NEEDS_PERMISSION)
def test_what_gives_the_checkpoint_another_meaning_needs_permission(option: str) -> None:
    change = OptionChange(option, 1, 2)
    assert option in map(dotted, option_paths(Config)), "an option that was renamed would never be refused"
    with pytest.raises(LaunchError, match=f"step_20 was trained with {option} 1, this config has 2.*--allow-change"):
        check_changes((change,), Path("step_20"), allow_change=False)
    check_changes((change,), Path("step_20"), allow_change=True)
    check_changes((OptionChange("optimizer.learning_rate", 1, 2),), Path("step_20"), allow_change=False)
