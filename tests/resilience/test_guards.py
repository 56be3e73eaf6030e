"""A step that is not what it should be changes no weight; the report names where it began; the run's end is bounded."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deepspeed.accelerator import get_accelerator

import megalite.engine.engine as engine_module
from megalite.config import Config
from megalite.config.guards import GuardsConfig
from megalite.engine.engine import Engine, build_engine
from megalite.engine.seams import loss_scaler_state, set_loss_scaler_state
from megalite.resilience.guards import Action, Guard, Intervention
from models.decoder import decoder_layers
from tests.engine.cases import Case, engine_of, global_batches, micro_batches_of
from tests.ranks import run_ranks
from tests.resilience.planting import Plant, higher_losses, planted


def _documents(sample: int) -> list[str]:
    return [f"document {2 * sample}", f"document {2 * sample + 1}"]


def _blame(rank: int, runs: list[tuple[Case, list[Plant]]]) -> list[tuple[str, dict[str, Any], float]]:
    """A step, then for each plant a bad one, then a step; the report of each, and the last loss."""
    seen = []
    for case, plants in runs:
        engine = engine_of(case)
        guard = Guard(engine, GuardsConfig(), _documents)
        batches = [micro_batches_of(engine, case, batch) for batch in global_batches(case)]
        assert _step(engine, guard, batches[0]) is None
        for plant in plants:
            with planted(engine, case, rank, plant):
                intervention = _step(engine, guard, batches[1])
            assert intervention is not None, plant
            seen.append((intervention.sentence, intervention.facts, 0.0))
        result = engine.train_step(batches[2], case.learning_rate, guard.judge)
        assert guard.after(9, result, batches[2]) is None
        seen.append(("", {}, float(result.loss)))
        engine.deepspeed.destroy()
    return seen


def _step(engine: Engine, guard: Guard, micro_batches: Any, step: int = 7) -> Intervention | None:
    result = engine.train_step(micro_batches, 1e-3, guard.judge)
    return guard.after(step, result, micro_batches)


DOWN, UP = "model.layers.3 mlp.down_proj", "model.layers.1 mlp.up_projections"
QKV, NORM = "model.layers.4.self_attn.qkv_proj.weight", "model.layers.0.input_layernorm.weight"

TWO_RANKS = [
    (
        Case(tp=2, accumulation=2),
        [
            Plant("output", UP, 1, 2),  # before the all-reduce, so on one rank
            Plant("output", "model.layers.2 input_layernorm", 0, 1),
            Plant("gradient", QKV, 0, 2),
            Plant("loss", "the loss", 1, 1),
            Plant("backward", UP, 1, 2),  # spreads to all layers before it, and there to the other rank
        ],
    ),
    (
        Case(pp=2, accumulation=3, dtype="bf16"),
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
        Case(dp=2, zero=2, accumulation=2),
        [
            Plant("output", "model.embed_tokens ", 1, 2),
            Plant("gradient", QKV, 1, 1),
            Plant("gradient", NORM, 0, 2, lasts=False),
        ],
    ),
    (
        Case(dp=2, zero=3, accumulation=2),
        [Plant("output", DOWN, 0, 2), Plant("gradient", QKV, 1, 2), Plant("loss", "the loss", 1, 2)],
    ),
    (
        Case(dp=2, zero=1, dtype="bf16", recompute="full", accumulation=2),
        [Plant("output", DOWN, 1, 2), Plant("gradient", QKV, 0, 1), Plant("weight", NORM, 1, 1)],
    ),
]


def _samples(case: Case, plant: Plant) -> list[int]:
    """Of the planted micro-batch: steps take the samples in order, replicas contiguous shares."""
    replica = plant.rank // case.tp % case.dp
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
    is_backward = plant.kind in ("gradient", "backward")
    cause = "weights" if plant.kind == "weight" else "gradients" if is_backward else "loss"
    assert (facts["step"], facts["cause"]) == (7, cause), where
    assert "step 7" in sentence, where
    if plant.kind == "weight":
        assert [(one["rank"], one["phase"], one["where"]) for one in suspects] == [(plant.rank, "weights", plant.where)]
        assert facts["action"] == "stop" and "no step can mend" in sentence, where
        return
    assert facts["came_again"] is plant.lasts, where
    assert ("neither the data nor the program" in sentence) is not plant.lasts, where
    if plant.kind == "gradient":
        assert facts["parameters"] == [plant.where], where
    if not plant.lasts and plant.kind == "gradient":
        assert suspects == [], where
        return
    path = plant.where.strip().replace(" ", ".") if plant.lasts or plant.kind == "loss" else "the loss"
    path = {"loss": "the loss", "backward": f"{path}.weight"}.get(plant.kind, path)
    coordinate = engine_module.Mesh(case.tp, case.pp, case.dp).coordinate(plant.rank)
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


WINDOW = 3
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
        config = GuardsConfig(loss_spike="rollback", spike_window=WINDOW, spike_z_score=20)
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
            with high if index in (1, 5) else nullcontext():
                result = engine.train_step(micro_batches, 1e-3, guard.judge)
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


def _actions(engine: Engine, case: Case, guard: Guard, plants: str, step: int = 1) -> list[Intervention | None]:
    """Steps without (.) and with (x) a gradient that is not finite, or with a weight that is not (w)."""
    batch = micro_batches_of(engine, case, global_batches(case)[0])
    seen = []
    for number, letter in enumerate(plants, start=step):
        kind = {"x": "gradient", "w": "weight"}.get(letter)
        with planted(engine, case, 0, Plant(kind, NORM, 0, 1)) if kind else nullcontext():
            seen.append(_step(engine, guard, batch, number))
    return seen


def _policies(rank: int) -> None:
    """All on one engine: what is checked is what the guard makes of its steps."""
    case = Case()
    engine = engine_of(case)
    skip, roll_back, stop = Action.SKIP, Action.ROLLBACK, Action.STOP

    def run(guard: Guard, plants: str) -> list[Action | None]:
        seen = _actions(engine, case, guard, plants)
        sentences.append(seen[-1].sentence if seen[-1] else "")
        return [one and one.action for one in seen]

    sentences: list[str] = []
    guard = Guard(engine, GuardsConfig(not_finite="skip", max_interventions=3))
    assert run(guard, ".xx.xxx") == [None, skip, skip, None, skip, skip, stop]
    assert sentences[-1].startswith(
        "3 steps in a row were skipped; 5 steps skipped and 0 rollbacks in all, the last at 5 (gradients), "
        "6 (gradients), 7 (gradients): step 7: the loss is finite, gradients are not; not finite are the gradients of "
        f"1 of 33 parameters ({NORM})"
    )
    guard = Guard(engine, GuardsConfig(not_finite="stop"))
    assert run(guard, ".x") == [None, stop]
    assert sentences[-1].startswith("guards.not_finite is stop; ")
    guard = Guard(engine, GuardsConfig(not_finite="rollback", max_interventions=2))
    early = guard.state()
    assert run(guard, ".x.x") == [None, roll_back, None, roll_back]
    guard.rolled_back(early)
    assert run(guard, "x") == [stop], "a rollback must not forget how many there were"
    assert sentences[-1].startswith("2 rollbacks did not help; ")


def test_policies_and_their_bounds() -> None:
    run_ranks(_policies, 1)


def _bad_weights(rank: int) -> None:
    case = Case()
    engine = engine_of(case)
    for policy, expected in (("skip", Action.STOP), ("rollback", Action.ROLLBACK), ("stop", Action.STOP)):
        guard = Guard(engine, GuardsConfig(not_finite=policy))
        _, bad = _actions(engine, case, guard, ".w")
        assert bad is not None and bad.action is expected, policy
        assert f"weights were not finite before it; {NORM} on rank 0" in bad.sentence, policy
        assert ("no step can mend weights" in bad.sentence) is (expected is Action.STOP), policy
    guard = Guard(engine, GuardsConfig(not_finite="rollback"))
    _actions(engine, case, guard, ".")
    guard.rolled_back(guard.state())
    (bad,) = _actions(engine, case, guard, "w")
    assert bad is not None and bad.action is Action.STOP, "the checkpoint itself is bad: going back to it is no help"
    assert "the weights that were loaded are not finite already" in bad.sentence


def test_weights_that_are_not_finite_end_the_run_and_are_named() -> None:
    run_ranks(_bad_weights, 1)


def _judgements(rank: int) -> None:
    def no_loss() -> float:
        raise AssertionError("nobody needs the loss")

    engine = engine_of(Case())
    assert Guard(engine, GuardsConfig()).takes(no_loss)
    guard = Guard(engine, GuardsConfig(loss_spike="skip", spike_window=3, spike_z_score=2.0))
    guard.restore({"losses": [4.0, 5.0, 6.0]})
    limit = 5.0 + 2.0 * float(np.std([4.0, 5.0, 6.0]))
    assert guard.takes(lambda: limit - 1e-9) and not guard.takes(lambda: limit + 1e-9)
    assert guard.takes(lambda: -100.0), "a loss far below is none"
    guard.restore({"losses": [5.0, 5.0, 5.0]})  # pushes the others out
    assert guard.takes(lambda: 5.000001), "rounding is no spike where losses are equal"
    assert not guard.takes(lambda: 5.1)


def test_what_is_a_spike() -> None:
    run_ranks(_judgements, 1)


def _fp16(rank: int) -> None:
    type(get_accelerator()).is_fp16_supported = lambda self: True  # no GPU is at hand
    case = Case(dp=2, zero=2)
    config = Config.model_validate(case.config().model_dump() | {"precision": {"dtype": "fp16"}})
    engine = build_engine(decoder_layers(config.model), config, config.check_world(2, "cuda"))
    optimizer = engine.deepspeed.optimizer
    guard = Guard(engine, GuardsConfig(not_finite="stop", loss_spike="skip", spike_window=1, max_interventions=4))
    assert _actions(engine, case, guard, ".") == [None]

    before = loss_scaler_state(optimizer)
    batch = micro_batches_of(engine, case, global_batches(case)[0])
    with higher_losses(engine, 0, 1, 1):
        spike = _step(engine, guard, batch)
    assert spike is not None and spike.report.cause == "spike"
    assert loss_scaler_state(optimizer) == before, "the loss scale is not to blame for a spike"

    for number in (1, 2):  # DeepSpeed lowers the scale at the second one
        (overflow,) = _actions(engine, case, guard, "x", number)
        assert overflow is not None and overflow.action is Action.SKIP, "how fp16 finds its scale is no reason to stop"
    assert "overflowed fp16, whose loss scale is 32768 now" in overflow.sentence
    (last,) = _actions(engine, case, guard, "x")
    assert last is not None and (last.action, last.report.cause) == (Action.STOP, "gradients"), "it goes on and on"
    assert last.report.suspects[0].where == NORM

    assert _actions(engine, case, guard, ".") == [None]
    set_loss_scaler_state(optimizer, before | {"cur_scale": 1.0, "cur_hysteresis": 1})
    (smallest,) = _actions(engine, case, guard, "x")
    assert smallest is not None and smallest.report.cause == "gradients", "the scale cannot fall any further"
    assert loss_scaler_state(optimizer)["cur_scale"] == 1.0


def test_fp16_finds_its_loss_scale_undisturbed() -> None:
    run_ranks(_fp16, 2)
