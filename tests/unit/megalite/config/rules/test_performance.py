"""What compiled blocks do not go with is one sentence if they are demanded, and a reason to stay eager if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.config import ConfigError, load_config
from megalite.config.rules.performance import problems_with_performance, why_not_compiled

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
    ({"model.num_experts": 4, "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 32}, "model.num_experts"),
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


CUT = {"parallel.tensor_parallel_size": 2, "parallel.sequence_parallel": True, "performance.symmetric_memory": True}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"performance.compile": "none"}, "performance.compile is none"),
        ({"parallel.zero_stage": 3}, "parallel.zero_stage 3"),
        ({"parallel.sequence_parallel": False}, "collectives of a cut sequence"),
        ({"precision.float8": "rowwise", "training.micro_batch_size": 16}, "precision.float8 is rowwise"),
    ],
    ids=str,
)
def test_what_products_in_shared_memory_lack_is_one_sentence(minimal: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, words_of(CUT | options))
    (sentence,) = [line for line in str(caught.value).splitlines() if "symmetric_memory" in line]
    assert said in sentence and "false" in sentence


def test_products_in_shared_memory_are_for_gpus(minimal: Path) -> None:
    """Also where the layout is chosen later."""
    config = load_config(minimal, words_of(CUT))
    assert list(problems_with_performance(config, "cuda")) == []
    (sentence,) = problems_with_performance(config, "cpu")
    assert "a run on CPUs" in sentence
    chosen_later = words_of(CUT | {"parallel.tensor_parallel_size": "auto", "parallel.sequence_parallel": "auto"})
    assert list(problems_with_performance(load_config(minimal, chosen_later), None)) == []
