"""Numbers counted by arithmetic against those of the layers that ranks build."""

from __future__ import annotations

import pytest
import torch

from megalite.config.remedies import tensor_parallel_fits
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.partition import stage_boundaries
from megalite.planner.shapes import active_parameters, parameters, stage_shapes
from models.decoder import decoder_layers
from tests.models.hub_models import HUB_MODELS, HubModel
from tests.models.test_families import options_of


@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_stages_hold_what_their_layers_hold(hub_model: HubModel) -> None:
    model = options_of(hub_model)
    specs = decoder_layers(model)
    for tp in (1, 2, 3, 4):
        if not tensor_parallel_fits(model, tp):
            continue
        for pp in range(1, model.num_hidden_layers + 1):
            bounds = stage_boundaries([spec.cost for spec in specs], [spec.is_block for spec in specs], pp)
            for stage, shape in enumerate(stage_shapes(model, tp, pp)):
                where = f"stage {stage} of tp={tp} pp={pp}"
                local = specs[bounds[stage] : bounds[stage + 1]]
                names = [spec.name for spec in local if spec.is_block]
                with torch.device("meta"):
                    built = {spec.module_key: spec.build(TensorParallel(tp, 0)) for spec in local}
                held = sum(p.numel() for layer in built.values() for p in layer.parameters())
                assert shape.parameters == held, where
                assert shape.blocks == len(names), where
                assert names[0] == f"model.layers.{shape.first_block}", where


def test_a_token_goes_through_some_experts() -> None:
    """Mixtral of the tests: 3 matrices per expert and layer."""
    model = options_of(next(m for m in HUB_MODELS if m.model_type == "mixtral"))
    assert model.num_experts is not None
    idle = model.num_experts - model.num_experts_per_tok
    expert = 3 * model.hidden_size * model.moe_intermediate_size
    assert parameters(model) - active_parameters(model) == model.num_hidden_layers * idle * expert > 0
