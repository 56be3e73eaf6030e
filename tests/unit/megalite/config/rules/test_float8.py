"""What `precision.float8` does not go with is one sentence, and what it advises works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megalite.config import ConfigError, load_config
from megalite.config.rules import float8 as float8_rules
from megalite.config.rules.float8 import check_float8_package

SIZES = {"model.intermediate_size": 176}  # of the minimal config; 172 is no multiple of 16

# options -> fragments of the sentence in this order, and what to change as it says
BROKEN: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = [
    ({"model.intermediate_size": 172}, ["intermediate_size 172", "172 features", "160 or 176"], SIZES),
    (
        {"model.intermediate_size": 176, "parallel.tensor_parallel_size": 2},
        ["intermediate_size 176", "88 features", "160 or 192"],
        {"model.intermediate_size": 192},
    ),
    (
        {"model.hidden_size": 72, "model.head_dim": 16},
        ["hidden_size 72", "multiple of 16", "64 or 80"],
        {"model.hidden_size": 80},
    ),
    (
        {"model.head_dim": 6},
        ["num_attention_heads 4", "head_dim 6", "24 + 2 x 24", "use a head_dim of"],
        {"model.head_dim": 16},
    ),
    (
        {"training.sequence_length": 20},
        ["micro_batch_size 2 x training.sequence_length 20 = 40 tokens", "16 or 32"],
        {"training.sequence_length": 32},
    ),
    (
        {"model.kv_lora_rank": 16, "model.qk_nope_head_dim": 8, "model.qk_rope_head_dim": 8, "model.v_head_dim": 16}
        | {"model.num_key_value_heads": 4},
        ["latent attention (model.kv_lora_rank)", "float8 none"],
        {"precision.float8": "none"},
    ),
    ({"parallel.zero_stage": 3}, ["zero_stage 3", "frees", "zero_stage 1 or 2"], {"parallel.zero_stage": 2}),
    ({"precision.dtype": "fp16"}, ["precision.dtype fp16", "bf16 or fp32"], {"precision.dtype": "fp32"}),
    (
        {"parallel.pipeline_schedule": "zero-bubble", "parallel.pipeline_parallel_size": 2},
        ["pipeline_schedule zero-bubble", "1f1b or interleaved"],
        {"parallel.pipeline_schedule": "1f1b"},
    ),
]


def load(minimal: Path, options: dict[str, Any]) -> None:
    load_config(minimal, [f"{name}={value}" for name, value in options.items()])


@pytest.mark.parametrize(("options", "fragments", "remedy"), BROKEN, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_broken_rule_names_options_reason_and_remedy(
    minimal: Path, options: dict[str, Any], fragments: list[str], remedy: dict[str, Any], recipe: str
) -> None:
    asked = SIZES | options
    load(minimal, {"precision.float8": "none"} | {name: v for name, v in asked.items()})
    with pytest.raises(ConfigError, match=f"precision.float8 {recipe}") as caught:
        load(minimal, {"precision.float8": recipe} | asked)
    assert len(str(caught.value).splitlines()) == 1
    assert re.search(".*".join(map(re.escape, fragments)), str(caught.value)), caught.value
    load(minimal, {"precision.float8": recipe} | asked | remedy)


def test_a_missing_torchao_is_one_sentence(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(minimal, ["precision.float8=rowwise", "model.intermediate_size=176"])
    check_float8_package(config)
    monkeypatch.setattr(float8_rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"precision.float8 rowwise needs torchao.*pip install 'megalite\[float8\]'"):
        check_float8_package(config)
    check_float8_package(load_config(minimal))
