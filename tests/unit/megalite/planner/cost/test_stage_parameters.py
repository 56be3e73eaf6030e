"""Numbers counted by arithmetic against those of the layers that ranks build."""

from __future__ import annotations

import pytest
import torch

from megalite.config.suggestions import tensor_parallel_fits
from megalite.parallel.collectives import RankGroup, TensorParallel
from megalite.parallel.mesh import stage_boundaries
from megalite.planner.cost.stage_parameters import stage_shapes
from megalite.schedules.tables import Schedule, placement
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
        for schedule, chunks in ((Schedule.ONE_F_ONE_B, 1), (Schedule.INTERLEAVED, 2), (Schedule.ZB_V, 2)):
            for pp in range(1, model.num_hidden_layers // chunks + 1):
                where = placement(schedule, pp, chunks)
                bounds = stage_boundaries([spec.cost for spec in specs], [spec.is_block for spec in specs], len(where))
                for stage, shape in enumerate(stage_shapes(model, tp, pp, schedule.value, chunks)):
                    case = f"stage {stage} of tp={tp} pp={pp} {schedule}"
                    held = [position for position, holder in enumerate(where) if holder == stage]
                    local = [spec for position in held for spec in specs[bounds[position] : bounds[position + 1]]]
                    with torch.device("meta"):  # a head that is tied to an embedding of the same stage has its key
                        built = {spec.module_key: spec.build(TensorParallel(tp, 0)) for spec in local}
                    numbers = sum(p.numel() for layer in built.values() for p in layer.parameters())
                    assert shape.parameters + shape.tied_copy == numbers, case
                    assert (shape.tied_copy > 0) == (model.tie_word_embeddings and 0 not in held and shape.has_head), (
                        case
                    )
                    names = [spec.name for spec in local if spec.is_block]
                    assert names == [f"model.layers.{layer}" for layer in shape.layers], case
                    assert (shape.has_embedding, shape.has_head) == (0 in held, len(where) - 1 in held), case


@pytest.mark.parametrize("hub_model", [each for each in HUB_MODELS if options_of(each).num_experts], ids=str)
def test_a_rank_has_its_share_of_experts_that_are_dealt(hub_model: HubModel) -> None:
    model = options_of(hub_model)
    assert model.num_experts is not None
    for tp in filter(lambda size: tensor_parallel_fits(model, size), (1, 2)):
        for ep in (1, model.num_experts):
            (shape,) = stage_shapes(model, tp, 1, "1f1b", 1, expert_parallel_size=ep)
            ranks = TensorParallel(tp, 0, experts=RankGroup(ep, ep - 1))
            with torch.device("meta"):
                layers = [spec.build(ranks) for spec in decoder_layers(model)]
            found = {id(p): p for layer in layers for p in layer.parameters()}.values()
            tied = found and model.tie_word_embeddings and layers[0].weight.numel()  # built for the head once more
            assert shape.parameters == sum(p.numel() for p in found) - tied
            assert shape.experts == sum(p.numel() for p in found if p.shard.stacked is not None)
