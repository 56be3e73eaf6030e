"""Variants as typed: every combination, and one sentence for what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest

from launch.errors import LaunchError
from launch.experiments.variants import VariedOption, bucket_sizes, micro_batch_sizes, recompute_modes, variants
from megalite.config import Config, resolve_layout


def test_all_combinations_with_the_last_option_changing_fastest() -> None:
    found = variants([VariedOption.parse("parallel.zero_stage=1,2"), VariedOption.parse("training.seed = 3, 4")])
    assert [point.name for point in found] == [
        "zero_stage=1 seed=3",
        "zero_stage=1 seed=4",
        "zero_stage=2 seed=3",
        "zero_stage=2 seed=4",
    ]
    assert found[1].overrides == ("parallel.zero_stage=1", "training.seed=4")
    assert [point.overrides for point in variants([])] == [()]


def test_options_of_one_name_are_told_apart() -> None:
    found = variants([VariedOption("optimizer.name", ("sgd",)), VariedOption("schedule.name", ("wsd",))])
    assert found[0].name == "optimizer.name=sgd schedule.name=wsd"


def test_commas_inside_brackets_and_quotes_belong_to_a_value() -> None:
    assert VariedOption.parse('recompute.mode=none,[full, none],"a,b"').values == ("none", "[full, none]", '"a,b"')


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["parallel.zero_stage"], "write an option and its values"),
        (["parallel.zero_stage="], "write an option and its values"),
        (["parallel.zero_stage=1,,2"], "write an option and its values"),
        (["=1,2"], "write an option and its values"),
        (["parallel.zero_stage=1,2,1"], "1 is there twice"),
        (["run_dir=a,b"], "run_dir is not varied but set for every run: -o names the folder"),
        (["training.steps=5,6"], "training.steps is not varied but set for every run: --steps"),
        (["training.seed=1,2", "training.seed=3"], "training.seed is varied twice"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(texts: list[str], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        variants([VariedOption.parse(text) for text in texts])


def test_presets_begin_with_what_the_config_has(tiny: dict[str, Any]) -> None:
    tiny["training"]["global_batch_size"] = 12
    config = Config.model_validate(tiny)
    assert [option.values[0] for option in bucket_sizes(config)] == ["50000000"]
    assert micro_batch_sizes(config, resolve_layout(config, 1, "cpu"))[0].values == ("2", "1", "4")
    assert recompute_modes(config)[0].values == ("none", "selective", "full")
    sharded = Config.model_validate(tiny | {"parallel": {"zero_stage": 3}, "recompute": {"mode": "full"}})
    assert {option.key: option.values for option in bucket_sizes(sharded)}[
        "deepspeed.zero_optimization.overlap_comm"
    ] == ("true", "false")
    assert recompute_modes(sharded)[0].values[0] == "full"
