"""Numbers counted by arithmetic against those of the layers that ranks build."""

from __future__ import annotations

import pytest
import torch

from megalite.config.suggestions import tensor_parallel_fits
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.mesh import stage_boundaries
from megalite.planner.cost.shapes import stage_shapes
from models.decoder import decoder_layers
from tests.helpers.hub_models import HUB_MODELS, HubModel
from tests.unit.models.families.test_families import options_of


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
