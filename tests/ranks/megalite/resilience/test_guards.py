"""A step that is not what it should be changes no weight; the report names where it began."""

from __future__ import annotations

import json
import math
import socket
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import megalite.engine.engine as engine_module
from megalite.config.sections import GuardsConfig
from megalite.engine.deepspeed.loss_scale import loss_scaler_state
from megalite.engine.engine import Engine
from megalite.resilience.guards import Action, Guard
from megalite.resilience.nonfinite_tracing import FirstNonfinite, gather_rank_reports, run_again
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.planting import Plant, another_loss, guarded_step, higher_losses, planted
from tests.helpers.rank_pool import run_ranks


def _documents(sample: int) -> list[str]:
    return [f"document {2 * sample}", f"document {2 * sample + 1}"]


def _sightings(engine: Engine, batch: Any) -> list[FirstNonfinite]:
    """What the hooks make of a healthy step, on all ranks."""
    optimizer = engine.deepspeed.optimizer
    result = engine.train_step(batch, 0.0)
    reports, _ = run_again(engine, batch, gather_rank_reports(engine, result, batch, []), loss_scaler_state(optimizer))
    return [seen for one in reports for seen in one.sightings]


def _blame(rank: int, runs: list[tuple[Case, list[Plant]]]) -> list[tuple[str, dict[str, Any], float]]:
    """A healthy step, then for each plant a bad one, then a step; the report of each, and the last loss."""
    seen = []
    for case, plants in runs:
        engine = engine_of(case)
        guard = Guard(engine, GuardsConfig(), _documents)
        batches = [micro_batches_of(engine, case, batch) for batch in global_batches(case)]
        assert guarded_step(engine, guard, batches[0]) is None
        assert _sightings(engine, batches[0]) == [], f"{case}: a healthy step"
        for plant in plants:
            with planted(engine, case, rank, plant):
                intervention = guarded_step(engine, guard, batches[1])
            assert intervention is not None, plant
            seen.append((intervention.sentence, intervention.facts, 0.0))
        result = engine.train_step(batches[2], case.learning_rate, guard)
        assert guard.after(9, result, batches[2]) is None
        seen.append(("", {}, float(result.loss)))
        engine.deepspeed.destroy()
    return seen


DOWN, UP = "model.layers.3 mlp.down_proj", "model.layers.1 mlp.up_projections"
EMBEDDING, QKV, NORM = (
    "model.embed_tokens.weight",
    "model.layers.4.self_attn.qkv_proj.weight",
    "model.layers.0.input_layernorm.weight",
)

# legitimate numbers beside the model's own: masks hold -inf, some experts get no token, dropout's keys are integers
WINDOW = {"model_type": "mistral", "sliding_window": 5}
DROPOUT = {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 30, "mlp_only_layers": [0, 1, 3]}

TWO_RANKS = [
    (
        Case(tp=2, accumulation=2, document_mask=True, sources=2),
        [
            Plant("output", UP, 1, 2),  # before the all-reduce, so on one rank
            Plant("output", "model.layers.2 input_layernorm", 0, 1),
            Plant("gradient", QKV, 0, 2),
            Plant("loss", "the loss", 1, 1),
            Plant("backward", UP, 1, 2),  # spreads to all layers before it, and there to the other rank
            Plant("sum", NORM, 0, 0),
            Plant("weight", NORM, 1, 1),
        ],
    ),
    (
        Case(pp=2, accumulation=3, dtype="bf16", model=DROPOUT, document_mask=True),
        [
            Plant("output", DOWN, 1, 3),
            Plant("output", UP, 0, 2),  # spreads to the second stage
            Plant("gradient", QKV, 1, 2),
            Plant("gradient", NORM, 0, 3),
            Plant("loss", "the loss", 1, 2),
            Plant("output", UP, 0, 1, lasts=False),
            Plant("backward", DOWN, 1, 2),  # spreads to the first stage
            Plant("weight", NORM, 0, 1),
        ],
    ),
    (
        Case(pp=2, accumulation=2, schedule="interleaved", model=WINDOW | {"tie_word_embeddings": True}),
        [
            Plant("gradient", EMBEDDING, 1, 2),  # the head's, which is no parameter there
            Plant("output", DOWN, 0, 2),  # in the third of four chunks; the loss is on the other rank
        ],
    ),
    (
        Case(pp=2, accumulation=2, schedule="zero-bubble", document_mask=True, model=EXPERTS),
        [Plant("backward", UP, 0, 2), Plant("output", "model.layers.4 mlp.experts.down_proj", 1, 1)],
    ),
    (
        Case(pp=2, accumulation=4, schedule="zb-v", document_mask=True, recompute="full"),
        [Plant("output", DOWN, 1, 3), Plant("loss", "the loss", 0, 2), Plant("backward", DOWN, 1, 4)],
    ),
    (
        Case(pp=2, accumulation=4, schedule="dualpipev", model=WINDOW, adapter={"name": "lora"}),
        [Plant("output", DOWN, 1, 3)],
    ),
    (
        Case(dp=2, zero=2, accumulation=2, model=WINDOW, recompute="selective"),
        [
            Plant("output", "model.embed_tokens ", 1, 2),
            Plant("gradient", QKV, 1, 1),
            Plant("gradient", NORM, 0, 2, lasts=False),
            Plant("sum", NORM, 0, 0),
        ],
    ),
    (
        Case(cp=2, cp_kind="all_gather", accumulation=2, sequence=36, document_mask=True),
        [Plant("output", DOWN, 1, 2), Plant("loss", "the loss", 1, 1), Plant("gradient", QKV, 0, 2)],
    ),
    (
        Case(dp=2, zero=3, accumulation=2, document_mask=True),
        [Plant("output", DOWN, 0, 2), Plant("gradient", QKV, 1, 2), Plant("loss", "the loss", 1, 2)],
    ),
    (
        Case(dp=2, zero=1, dtype="bf16", recompute="full", accumulation=2),
        [Plant("output", DOWN, 1, 2), Plant("gradient", QKV, 0, 1), Plant("weight", NORM, 1, 1)],
    ),
]


def _samples(case: Case, plant: Plant) -> list[int]:
    """Of the planted micro-batch: steps take the samples in order, replicas contiguous shares."""
    replica = plant.rank // (case.tp * case.cp) % case.dp
    first = case.batch + (replica * case.accumulation + plant.micro_batch - 1) * case.micro_batch
    return list(range(first, first + case.micro_batch))


def _check_blame(runs: list[tuple[Case, list[Plant]]]) -> None:
    ranks = run_ranks(_blame, runs[0][0].world_size, runs)
    found = iter(ranks[0])
    for rank, others in enumerate(ranks):
        assert json.dumps(others, allow_nan=False) == json.dumps(ranks[0]), f"rank {rank} says something else"
    for case, plants in runs:
        for plant in plants:
            _check_report(case, plant, *next(found)[:2])
        loss = next(found)[2]
        assert math.isfinite(loss), f"{case}: the next step is spoiled"


def _check_report(case: Case, plant: Plant, sentence: str, facts: dict[str, Any]) -> None:
    where, suspects = f"{case} {plant}: {sentence}", facts["suspects"]
    if plant.kind == "weight" and case.dtype == "bf16":
        # the bf16 weight was bad, not the fp32 one: the skipped step has written this one's value over it
        plant = replace(plant, kind="loss", lasts=False)
    is_backward = plant.kind in ("gradient", "backward", "sum")
    cause = "weights" if plant.kind == "weight" else "gradients" if is_backward else "loss"
    assert (facts["step"], facts["cause"]) == (7, cause), where
    assert "step 7" in sentence, where
    if plant.kind == "weight":
        assert [(one["rank"], one["phase"], one["where"]) for one in suspects] == [(plant.rank, "weights", plant.where)]
        assert facts["action"] == "stop" and "no step can mend" in sentence, where
        return
    assert facts["came_again"] is plant.lasts, where
    accusation = f"suspect the memory and the devices of {socket.gethostname()}, or, as training.deterministic is off"
    assert (accusation in sentence) is ("suspect" in sentence) is not plant.lasts, where
    assert facts["hosts"] == ([] if plant.lasts else [socket.gethostname()]), where
    if plant.kind in ("gradient", "sum"):
        assert facts["parameters"] == [plant.where], where
    assert ("their sum over micro-batches and replicas" in sentence) is (plant.kind == "sum"), where
    if plant.kind == "sum":
        assert suspects == [], where
        return
    if not plant.lasts and plant.kind == "gradient":
        assert suspects == [], where
        return
    path = plant.where.strip().replace(" ", ".") if plant.lasts or plant.kind == "loss" else "the loss"
    path = {"loss": "the loss", "backward": f"{path}.weight"}.get(plant.kind, path)
    coordinate = engine_module.Mesh(case.tp, case.pp, case.dp, case.cp).coordinate(plant.rank)
    for one in suspects:
        assert one["where"] == path and path in sentence, where
        assert one["phase"] == ("backward" if is_backward else "forward"), where
        assert one["micro_batch"] == plant.micro_batch, where
        assert one["samples"] == _samples(case, plant), where
        assert one["replica"] == coordinate.data_rank, where
    if plant.lasts:
        assert [one["rank"] for one in suspects] == [plant.rank], where
        assert suspects[0]["stage"] == coordinate.pipeline_rank, where
        assert suspects[0]["tensor_rank"] == coordinate.tensor_rank, where
        assert f"rank {plant.rank} (stage" in sentence, where
        assert (f"context rank {coordinate.context_rank}," in sentence) is (case.cp > 1), where
    assert facts["documents"] == [name for sample in _samples(case, plant) for name in _documents(sample)], where


EIGHT_RANKS = [
    (
        Case(tp=2, pp=2, dp=2, accumulation=2),
        [Plant("output", UP, 3, 2), Plant("backward", DOWN, 6, 1), Plant("loss", "the loss", 7, 2)],
    )
]


@pytest.mark.parametrize("runs", [TWO_RANKS, pytest.param(EIGHT_RANKS, marks=pytest.mark.slow)])
def test_the_report_names_rank_layer_micro_batch_samples_and_documents(runs: list[tuple[Case, list[Plant]]]) -> None:
    _check_blame(runs)


SPIKE_WINDOW = 3
SPIKES = [
    Case(tp=2, accumulation=2, steps=7),
    Case(pp=2, accumulation=3, steps=7),
    Case(dp=2, zero=3, accumulation=2, steps=7),
    Case(dp=2, zero=1, dtype="bf16", steps=7),
]


def _spikes(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    seen = []
    for case in cases:
        engine = engine_of(case)
        config = GuardsConfig(loss_spike="rollback", spike_window=SPIKE_WINDOW, spike_z_score=20)
        guard = Guard(engine, config, _documents)
        losses, actions, facts = [], [], {}
        for index, batch in enumerate(global_batches(case)):
            micro_batches = micro_batches_of(engine, case, batch)
            if index == 3:  # another process takes over
                resumed = Guard(engine, config, _documents)
                resumed.restore(json.loads(json.dumps(guard.state())))
                guard = resumed
            # the second step is too early for a judgement
            high = higher_losses(engine, case.dp - 1, case.accumulation, case.accumulation)
            apart = another_loss(engine.coordinate.tensor_rank)
            with apart, high if index in (1, 5) else nullcontext():
                result = engine.train_step(micro_batches, 1e-3, guard)
            losses.append(float(result.loss))
            if intervention := guard.after(index + 1, result, micro_batches):
                facts = intervention.facts
            actions.append(intervention and intervention.action)
        seen.append({"losses": losses, "actions": actions, "facts": facts, "state": guard.state()})
        engine.deepspeed.destroy()
    return seen


def test_a_spike_is_refused_and_the_highest_micro_batch_is_named() -> None:
    ranks = run_ranks(_spikes, 2, SPIKES)
    for index, case in enumerate(SPIKES):
        seen, facts = ranks[0][index], ranks[0][index]["facts"]
        assert all(json.dumps(other[index]) == json.dumps(seen) for other in ranks), f"{case}: ranks disagree"
        # step 2 comes too early for a judgement, and step 6 is judged by steps 3 to 5
        assert seen["actions"] == [None] * 5 + [Action.ROLLBACK, None], case
        losses = seen["losses"]
        mean, deviation = np.mean(losses[2:5]), np.std(losses[2:5])
        assert facts["spike"]["mean"] == mean and facts["spike"]["standard_deviation"] == deviation, case
        assert facts["spike"]["z_score"] == (losses[5] - mean) / deviation > 20, case
        assert seen["state"]["losses"] == [*losses[3:5], losses[6]], f"{case}: a refused loss is no measure"
        (suspect,) = facts["suspects"]
        plant = Plant("loss", "", engine_module.Mesh(case.tp, case.pp, case.dp).rank(case.pp - 1, case.dp - 1, 0), 0)
        plant = replace(plant, micro_batch=case.accumulation)
        assert (suspect["rank"], suspect["micro_batch"]) == (plant.rank, plant.micro_batch), case
        samples = [sample + 4 * case.batch for sample in _samples(case, plant)]
        assert suspect["samples"] == samples, case
        assert abs(suspect["loss"] - mean - 30) < 1, f"{case}: the mean over the micro-batch's valid tokens"
        assert facts["documents"] == [name for sample in samples for name in _documents(sample)], case
        assert len(facts["parameters"]) == 3, case
        assert f"micro-batch {case.accumulation} on rank {plant.rank}" in facts["sentence"], case
