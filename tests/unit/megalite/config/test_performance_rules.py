"""What compiled blocks do not go with is one sentence if they are demanded, and a reason to stay eager if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.config import ConfigError, load_config
from megalite.config.performance_rules import why_not_compiled

# options -> words of the sentence
EAGER: list[tuple[dict[str, Any], str]] = [
    ({"parallel.zero_stage": 3}, "parallel.zero_stage 3"),
    (
        {"parallel.pipeline_schedule": "zero-bubble", "parallel.pipeline_parallel_size": 2},
        "parallel.pipeline_schedule zero-bubble",
    ),
    (
        {"parallel.pipeline_parallel_size": 2, "recompute.mode": ["none", "selective"]},
        "recompute.mode none and selective",
    ),
    ({"offload.activations": "cpu"}, "offload.activations cpu"),
    ({"model.residual_dropout": 0.1}, "dropout in the model"),
    ({"model.attention_dropout": 0.1}, "dropout in the model"),
    (
        {"model.num_experts": 4, "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 32},
        "model.num_experts",
    ),
]


def words_of(options: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


@pytest.mark.parametrize(("options", "said"), EAGER, ids=str)
def test_each_refusal_names_its_option_and_auto_stays_eager(minimal: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [*words_of(options), "performance.compile=blocks"])
    (sentence,) = str(caught.value).splitlines()
    assert said in sentence and sentence.endswith("use performance.compile auto or none")
    for advised in ("auto", "none"):
        config = load_config(minimal, [*words_of(options), f"performance.compile={advised}"])
        assert said in (why_not_compiled(config) or "")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parallel.zero_stage": 2, "recompute.mode": "selective"},
        {"parallel.pipeline_parallel_size": 2, "parallel.pipeline_schedule": "1f1b"},
        {"parallel.tensor_parallel_size": 2, "parallel.sequence_parallel": True, "recompute.mode": "full"},
    ],
    ids=str,
)
def test_other_runs_may_be_compiled(minimal: Path, options: dict[str, Any]) -> None:
    assert why_not_compiled(load_config(minimal, [*words_of(options), "performance.compile=blocks"])) is None
