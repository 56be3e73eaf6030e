from __future__ import annotations

import copy
from typing import Any

import pytest

from megalite.config import Config
from megalite.engine.deepspeed_config import deepspeed_config

BASE = {
    "run_dir": "unused",
    "model": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "data": {"path": "unused"},
    "training": {"global_batch_size": 24, "micro_batch_size": 2, "sequence_length": 16, "steps": 5},
}


def made(world_size: int, **sections: dict[str, Any]) -> dict[str, Any]:
    config = Config.model_validate({**BASE, **sections})
    return deepspeed_config(config, config.check_world(world_size, "cuda"))


def test_batch_sizes_multiply_out() -> None:
    # DeepSpeed refuses a config where they do not
    result = made(12, parallel={"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 3})
    assert result["train_batch_size"] == 24
    assert result["train_micro_batch_size_per_gpu"] == 2
    assert result["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(("wanted", "given"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_zero_stage_0_becomes_1(wanted: int, given: int) -> None:
    assert made(1, parallel={"zero_stage": wanted})["zero_optimization"]["stage"] == given


@pytest.mark.parametrize(
    ("precision", "bf16", "fp16", "data_types"),
    [
        ({"dtype": "fp32"}, False, False, None),
        ({}, True, False, {"grad_accum_dtype": "fp32"}),
        ({"dtype": "bf16", "gradient_accumulation_dtype": "bf16"}, True, False, {"grad_accum_dtype": "bf16"}),
        ({"dtype": "fp16"}, False, True, {"grad_accum_dtype": "fp32"}),
    ],
    ids=str,
)
def test_precision(precision: dict[str, str], bf16: bool, fp16: bool, data_types: dict[str, str] | None) -> None:
    result = made(1, precision=precision)
    assert (result["bf16"]["enabled"], result["fp16"]["enabled"]) == (bf16, fp16)
    assert result.get("data_types") == data_types


@pytest.mark.parametrize("clip", [0.0, 0.5, 1.0])
def test_clipping_is_always_said(clip: float) -> None:
    # DeepSpeed's own default became 1.0 in 0.19.3
    assert made(1, training=BASE["training"] | {"gradient_clipping": clip})["gradient_clipping"] == clip


def test_what_is_slow_or_broken_under_pipelines_is_off() -> None:
    result = made(2, parallel={"pipeline_parallel_size": 2})
    assert result["pipeline"] == {
        "pipe_partitioned": False,
        "grad_partitioned": False,
        "use_reentrant": False,
        "activation_checkpoint_interval": 0,
    }
    assert result["wall_clock_breakdown"] is False


def test_the_users_section_is_merged_deep() -> None:
    theirs = {
        "zero_optimization": {"reduce_bucket_size": 7, "offload_optimizer": {"device": "cpu"}},
        "comms_logger": {"enabled": True},
        "data_types": {},
    }
    kept = copy.deepcopy(theirs)
    plain, result = made(1), made(1, deepspeed=theirs)
    assert result["zero_optimization"] == plain["zero_optimization"] | theirs["zero_optimization"]
    assert result["comms_logger"] == {"enabled": True}
    changed = {"zero_optimization", "comms_logger"}
    assert {k: v for k, v in result.items() if k not in changed} == {k: v for k, v in plain.items() if k not in changed}
    assert theirs == kept, "the user's section was written to"


def test_the_same_config_gives_the_same_result_and_nothing_is_shared() -> None:
    config = Config.model_validate(BASE | {"deepspeed": {"comms_logger": {"enabled": True}}})
    layout = config.check_world(1, "cuda")
    first = deepspeed_config(config, layout)
    expected = copy.deepcopy(first)
    first["zero_optimization"]["stage"] = 99
    first["comms_logger"]["enabled"] = False
    assert deepspeed_config(config, layout) == expected
