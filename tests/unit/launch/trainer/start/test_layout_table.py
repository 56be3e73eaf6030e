"""Who holds what, of models with layers between the embedding and the blocks, and with experts."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from launch.trainer.start.layout_table import layout_rows, layout_table
from megalite.config import resolve_layout
from tests.helpers.engine_cases import Case

SIZES = {"hidden_size": 48, "num_hidden_layers": 5}
LEARNED = {"position_embedding": "learned", "max_position_embeddings": 40}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 30, "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("model", "first", "last"),
    [
        (LEARNED, "embed_tokens, embed_positions, layers 0-2", "layers 3-4, norm, lm_head"),
        (LEARNED | {"num_hidden_layers": 2}, "embed_tokens, embed_positions, layer 0", "layer 1, norm, lm_head"),
    ],
    ids=["learned positions", "one block each"],
)
def test_layers_are_named_in_their_order(model: dict[str, Any], first: str, last: str) -> None:
    config = Case(pp=2, model=SIZES | model).config()
    layout = resolve_layout(config, 2, "cpu")
    console = Console(width=200)
    with console.capture() as captured:
        layout_table(layout_rows(config, layout), layout).print(console)
    shown = captured.get()
    assert first in shown and last in shown


def test_all_experts_are_held_and_few_are_on_a_tokens_way() -> None:
    """Parameters count every expert, the balance of stages the active ones."""
    config = Case(tp=2, pp=2, model=SIZES | EXPERTS).config()
    rows = layout_rows(config, resolve_layout(config, 4, "cpu"))
    attention = 48 * 12 * (2 * 4 + 2 * 2)  # q, k, v, o of four heads, two for keys and values
    router, expert = 4 * 48, 3 * 48 * 30
    norms = 2 * 48
    layers = {name: row.stage for row in rows for name in row.layers}
    held = sum(row.parameters for row in rows if row.stage == layers["model.layers.4"])
    blocks = sum(stage == layers["model.layers.4"] for name, stage in layers.items() if "layers." in name)
    once_per_block = attention + 4 * expert + 2 * (router + norms)  # replicated ones on both ranks
    assert held == blocks * once_per_block + 2 * 48 + 2 * 66 * 48  # the last norm; 131 tokens padded to 132
    dealt = Case(tp=2, pp=2, dp=2, ep=2, model=SIZES | EXPERTS).config()
    rows = layout_rows(dealt, resolve_layout(dealt, 8, "cpu"))
    of_replica = [row.parameters for row in rows if row.stage == layers["model.layers.4"] and row.data_rank == 1]
    assert sum(of_replica) == held - blocks * 2 * expert
