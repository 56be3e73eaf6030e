"""The bias of the experts' choice: the integers of its definition on every layout, through checkpoints and skips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from launch.conversion.huggingface.exporting import plan_export
from launch.inference.command_options import ModelPlacement
from launch.inference.session import load
from megalite.checkpoint import engine_state
from megalite.checkpoint.engine_state import load_engine, own_blocks, own_size
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.reader import CheckpointReader
from megalite.engine.engine import Engine
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.expert_balance import expert_balances
from megalite.parallel.layers import SerialModel, make_layer
from megalite.resilience.replica_check import find_disagreements
from models.decoder import decoder_layers
from models.experts import ExpertChoice, SparseMLP
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import save

EXPERTS, TOP_K, RATE = 12, 2, 0.02  # a fifth of a mean score: choices are others than without it
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 29, "mlp_only_layers": [1]}
BASE = Case(
    model=MOE,
    micro_batch=1,
    sequence=6,
    steps=4,
    global_batch=2,
    optimizer="sgd",
    learning_rate=0.1,
    router={"bias_rate": RATE},
)
LAYOUTS = [
    replace(BASE, dp=2),
    replace(BASE, dp=2, zero=2),
    replace(BASE, dp=2, zero=3, recompute="full"),
    replace(BASE, dp=2, ep=2, recompute="full"),
    replace(BASE, pp=2, recompute="full"),
    replace(BASE, pp=2, schedule="zero-bubble"),
    replace(BASE, tp=2, micro_batch=2),
    replace(BASE, tp=2, sequence_parallel=True),
]
Biases = dict[str, np.ndarray]


def biases_of(engine: Engine) -> Biases:
    return {} if engine.expert_bias is None else {name: b.numpy().copy() for name, b in engine.expert_bias.named()}


def steps(engine: Engine, case: Case, first: int, last: int) -> None:
    for batch in global_batches(case)[first:last]:
        micro_batches = micro_batches_of(engine, case, batch)
        assert engine.train_step(micro_batches, case.learning_rate).taken
        engine.evaluate(micro_batches, case.batch // (case.micro_batch * case.dp))  # which must not count


def trained(rank: int, cases: list[Case]) -> list[Biases]:
    seen = []
    for case in cases:
        engine = engine_of(case)
        steps(engine, case, 0, case.steps)
        seen.append(biases_of(engine))
        if engine.expert_bias is not None:  # a stage has experts
            counts = engine.expert_bias._counts
            assert counts.sum(dim=1).tolist() == [case.batch * case.sequence * TOP_K] * len(counts), case
    return seen


def integers_by_definition(case: Case) -> dict[str, np.ndarray]:
    """Biases in units of rate / experts after the case's training in float64, without an engine; counted in numpy."""
    config = case.config()
    make = partial(make_layer, seed=case.seed, initializer_range=config.model.initializer_range)
    model = SerialModel(decoder_layers(config.model), TensorParallel(), make).double()
    placed = list(expert_balances(model))
    units = {name: np.zeros(EXPERTS, dtype=np.int64) for _, name, _ in placed}
    choices: dict[str, ExpertChoice] = {}
    for (_, name, _), block in zip(placed, (m for m in model.modules() if isinstance(m, SparseMLP)), strict=True):
        block.gate.register_forward_hook(lambda _, inputs, out, name=name: choices.update({name: out}))
    decay = config.optimizer.weight_decay
    groups = [[p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.SGD(
        [{"params": groups[0], "weight_decay": decay}, {"params": groups[1]}], lr=case.learning_rate
    )
    is_moved = False
    for batch in global_batches(case):
        for _, name, balance in placed:
            balance.bias = torch.from_numpy(units[name] * (RATE / EXPERTS))
        hidden, head = model(torch.from_numpy(batch.tokens))
        targets = torch.from_numpy(batch.targets).flatten()
        loss = nn.functional.cross_entropy(nn.functional.linear(hidden, head).flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        for name, choice in choices.items():
            exponentials = np.exp(choice.logits.detach().flatten(0, 1).numpy())
            scores = exponentials / exponentials.sum(-1, keepdims=True)
            order = np.argsort(scores + units[name] * (RATE / EXPERTS))[:, -TOP_K:]
            is_moved |= bool((np.sort(order) != np.sort(np.argsort(scores)[:, -TOP_K:])).any())
            chosen, weights = (t.detach().flatten(0, 1).numpy() for t in (choice.experts, choice.weights))
            np.testing.assert_array_equal(np.sort(chosen), np.sort(order))
            of_chosen = np.take_along_axis(scores, chosen, axis=1)
            np.testing.assert_allclose(weights, of_chosen / of_chosen.sum(-1, keepdims=True), rtol=1e-12)
            counts = [int((order == expert).sum()) for expert in range(EXPERTS)]
            signs = [(count * EXPERTS > sum(counts)) - (count * EXPERTS < sum(counts)) for count in counts]
            units[name] = units[name] - [EXPERTS * sign - sum(signs) for sign in signs]
    assert is_moved, "the bias changes no choice: the test would not see one that is not used"
    return units


@pytest.mark.slow
def test_biases_are_the_integers_of_the_definition_on_every_layout() -> None:
    """Catches counts of a replica or micro-batch alone, of blocks that are recomputed or evaluated, or of ranks that
    share a block; a bias in the weights of outputs; and one that is cast or cut."""
    ((serial,),) = run_ranks(trained, 1, [BASE])
    expected = integers_by_definition(BASE)
    assert serial.keys() == expected.keys() == {f"model.layers.{layer}.mlp.balance.bias" for layer in (0, 2, 3, 4)}
    for name, units in expected.items():
        np.testing.assert_allclose(serial[name] * (EXPERTS / RATE), units, atol=1e-3, err_msg=name)
    for case, *ranks in zip(LAYOUTS, *run_ranks(trained, 2, LAYOUTS), strict=True):
        assert {name for rank in ranks for name in rank} == serial.keys()
        for rank in ranks:
            for name, bias in rank.items():
                assert bias.dtype == np.float32 and bias.tobytes() == serial[name].tobytes(), f"{case}: {name}"


def saved_midway(rank: int, case: Case, root: Path) -> tuple[int, int]:
    engine = engine_of(case)
    expected, _ = own_size(engine)
    steps(engine, case, 0, 2)
    config = {"model": case.config().model.model_dump(mode="json")}
    assert save(engine, root, 2, background=True, config=config).failure is None
    return expected, sum(block.numbers.numel() for block in own_blocks(engine).blocks)


def resumed(rank: int, case: Case, folder: Path) -> tuple[Biases, Biases]:
    """Biases as loaded, and after the steps that remain."""
    engine = engine_of(replace(case, seed=case.seed + 1))
    load_engine(engine, CheckpointReader(folder), weights_only=False)
    loaded = biases_of(engine)
    steps(engine, case, 2, case.steps)
    return loaded, biases_of(engine)


@pytest.mark.slow
def test_a_checkpoint_has_the_biases_for_every_layout_and_for_inference(tmp_path: Path) -> None:
    for expected, saved in run_ranks(saved_midway, 2, replace(BASE, dp=2, zero=3), tmp_path):
        assert expected == saved
    folder, ((whole, midway),) = tmp_path / "step_00000002", run_ranks(trained, 1, [BASE, replace(BASE, steps=2)])
    assert not any((whole[name] == midway[name]).all() for name in whole)
    for case in (replace(BASE, tp=2), replace(BASE, pp=2)):
        for loaded, after in run_ranks(resumed, 2, case, folder):
            for name in after:
                np.testing.assert_array_equal(loaded[name], midway[name])
                np.testing.assert_array_equal(after[name], whole[name])
    frozen = replace(BASE, router={})
    for loaded, after in run_ranks(resumed, 1, frozen, folder):
        assert loaded.keys() == after.keys() == midway.keys(), "bias_rate 0 keeps what a checkpoint has"
        assert all((after[name] == midway[name]).all() for name in midway)
    model = load(ModelPlacement(str(folder), device="cpu", dtype="fp32")).module
    for _, name, balance in expert_balances(model):
        np.testing.assert_array_equal(balance.bias, midway[name])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"holds a bias of the experts' choice \(model\.layers\.0"):
        plan_export(folder, tmp_path / "folder")


def began_at_zero(rank: int, root: Path) -> tuple[bool, str]:
    """Whether loading what has no biases cleared those of a live engine, and what was said."""
    saved_midway(rank, replace(BASE, router={}), root)
    engine = engine_of(BASE)
    steps(engine, BASE, 0, 1)
    with patch.object(engine_state.log, "info") as said:
        load_engine(engine, CheckpointReader(root / "step_00000002"), weights_only=False)
    return not any(bias.any() for bias in biases_of(engine).values()), str(said.call_args)


def test_a_checkpoint_without_biases_begins_at_zero_and_says_so(tmp_path: Path) -> None:
    ((are_zero, said),) = run_ranks(began_at_zero, 1, tmp_path)
    assert are_zero and "holds no bias: it begins at 0" in said


class Answer:
    """A gate with one answer."""

    def __init__(self, answer: bool, *, waits: bool) -> None:
        self.answer, self.waits = answer, waits

    def takes(self, loss: Callable[[], float]) -> bool:
        return self.answer

    def examine(self) -> None:
        pass


def not_taken(rank: int, case: Case) -> dict[str, Any]:
    """How biases moved in steps that were not taken, and in one that was."""
    engine = engine_of(case)
    micro_batches = micro_batches_of(engine, case, global_batches(case)[0])
    *_, (_, parameter) = engine.parameters()
    moved = {}

    def step(name: str, gate: Answer, *, is_spoilt: bool = False) -> None:
        before = biases_of(engine)
        hook = parameter.register_hook(lambda gradient: gradient * float("nan")) if is_spoilt else None
        result = engine.train_step(micro_batches, case.learning_rate, gate)
        if hook is not None:
            hook.remove()
        after = biases_of(engine)
        moved[name] = (result.taken, {bool((after[each] != before[each]).any()) for each in before})

    step("refused", Answer(False, waits=True))
    step("not finite", Answer(True, waits=True), is_spoilt=True)
    step("late", Answer(True, waits=False), is_spoilt=True)
    if engine.decision.is_late(Answer(True, waits=False)):
        step("held back", Answer(True, waits=False))
    engine.decision.allow_updates()
    step("taken", Answer(True, waits=False))
    if rank == case.world_size - 1 and engine.expert_bias is not None:
        _, bias = next(engine.expert_bias.named())
        bias[3] += 1e-6
    return {"moved": moved, "differing": [each.parameter for each in find_disagreements(engine)]}


@pytest.mark.parametrize("case", [replace(BASE, dp=2, ep=2), replace(BASE, dp=2, zero=2), replace(BASE, tp=2)], ids=str)
def test_a_step_that_is_not_taken_leaves_biases_and_the_self_check_compares_them(case: Case) -> None:
    for seen in run_ranks(not_taken, 2, case):
        taken = seen["moved"].pop("taken")
        assert taken == (True, {True})
        assert set(seen["moved"]) >= {"refused", "not finite", "late"}
        assert seen["moved"] == dict.fromkeys(seen["moved"], (False, {False}))
        assert seen["differing"] == ["model.layers.0.mlp.balance.bias"]
