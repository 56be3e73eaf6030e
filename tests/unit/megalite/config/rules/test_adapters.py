"""What adapters do not go with is one sentence, and what it advises works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megalite.config import ConfigError, load_config

LORA = {"adapter.name": "lora", "training.initialize_from": "some/model"}
EXPERTS = {"model.num_experts": 4, "model.moe_intermediate_size": 48, "model.num_experts_per_tok": 2}
ATTENTION = {"adapter.targets": "[q_proj, o_proj]"}

# options -> fragments of the sentence in this order, and what to change as it says
BROKEN: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = [
    ({"adapter.rank": 4}, ["adapter.rank 4", "adapter.name none", "set adapter.name lora"], LORA),
    ({"adapter.name": "lora"}, ["without training.initialize_from", "random"], LORA),
    (LORA | {"parallel.zero_stage": 3}, ["zero_stage 3", "zero_stage 1 or 2"], {"parallel.zero_stage": 2}),
    (LORA | {"optimizer.name": "muon"}, ["optimizer.name muon", "adamw"], {"optimizer.name": "adamw"}),
    (
        LORA | {"precision.float8": "rowwise", "model.intermediate_size": 176},
        ["float8 rowwise", "float8 none"],
        {"precision.float8": "none"},
    ),
    (LORA | EXPERTS, ["adapter.targets all-linear", "num_experts 4", "[q_proj, k_proj, v_proj, o_proj]"], ATTENTION),
    (
        LORA | {"adapter.targets": "[q_proj, kv_b_proj]"},
        ["adapter.targets q_proj, kv_b_proj", "names kv_b_proj", "no latent", "q_proj, k_proj"],
        {"adapter.targets": "[q_proj]"},
    ),
    (
        LORA | {"model.gated_mlp": "false", "adapter.targets": "[gate_proj, up_proj]"},
        ["adapter.targets gate_proj, up_proj", "gated_mlp false", "remove it"],
        {"adapter.targets": "[up_proj]"},
    ),
    (
        LORA | EXPERTS | ATTENTION | {"training.router.z_loss": 0.1},
        ["training.router.z_loss 0.1", "routers", "adapter.name none"],
        {"training.router.z_loss": 0},
    ),
]


def load(minimal: Path, options: dict[str, Any]) -> None:
    load_config(minimal, [f"{name}={value}" for name, value in options.items()])


@pytest.mark.parametrize(("options", "fragments", "change"), BROKEN, ids=[fragments[0] for _, fragments, _ in BROKEN])
def test_a_broken_rule_is_one_sentence_whose_advice_works(
    minimal: Path, options: dict[str, Any], fragments: list[str], change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(minimal, options)
    assert re.search(".*".join(map(re.escape, fragments)), str(caught.value)), caught.value
    load(minimal, options | change)
