"""Promise 1: any layout computes the same thing, and it is what transformers computes on one process.

Every layout trains three AdamW steps and three SGD steps; the two catch different bugs. AdamW divides each gradient
by its own size, so it hides a gradient that was reduced twice or not at all; plain SGD under a clip that bites shows
it in the update, and shows a wrong global norm in every weight. AdamW in turn shows moments cut wrongly by ZeRO,
bias correction and decay groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.parity import (
    Case,
    Reference,
    assemble,
    engine_of,
    global_batches,
    local_weights,
    micro_batches_of,
    reference,
    train_all,
)
from tests.ranks import run_ranks

# Both sides are fp32 and differ in the order of summation only: measured up to 2e-7 on losses, 5e-7 on norms.
RELATIVE = 2e-5
# Of the largest weight; the movement in three steps is 3e-3 of it. Measured up to 8e-6.
ADAMW_WEIGHT = 1e-4
# SGD: measured nothing above the last bits of the weights. A missed or doubled reduction is an error of 0.3 or more.
SGD_UPDATE = 1e-5
ROUNDING = float(np.finfo(np.float32).eps)  # of the largest weight, per step: each side rounds `w - lr * g`
# A bf16 run may be as far from fp32 as transformers' own bf16 run, twice over: both errors are draws of the same noise.
BF16_OF_TRANSFORMERS = 2.0
BF16_NORM = (
    2e-2  # five times bf16's epsilon; measured up to 6e-3. A norm says too little about its noise to compare two
)

TIED = {"tie_word_embeddings": True}
ONE_KV_HEAD = {"num_key_value_heads": 1}
BIASES = {"attention_bias": True, "mlp_bias": True}

# The model (parity.MODEL) is odd everywhere: 131 tokens and 101 intermediate features divide by no tp, 5 blocks by no
# pp, and targets are hidden in unequal numbers, so every case pads, cuts unevenly and weights its tokens.
LAYOUTS = [
    Case(),
    Case(accumulation=4),
    # each axis alone
    Case(tp=2),
    Case(tp=3, model={"num_attention_heads": 6, "num_key_value_heads": 3}),
    Case(tp=4),
    Case(pp=2),
    Case(pp=4),
    Case(pp=2, accumulation=4),
    Case(pp=4, accumulation=4),
    Case(dp=2),
    Case(dp=3),
    Case(dp=2, zero=2, accumulation=4),
    Case(dp=2, zero=3, accumulation=4),
    # together
    Case(tp=2, dp=2, zero=2),
    Case(tp=2, dp=2, zero=3),
    Case(tp=2, pp=2, dp=2),
    Case(tp=2, pp=2, dp=2, accumulation=4, micro_batch=1),
    # sequence parallel
    Case(tp=2, sequence_parallel=True, sequence=34),
    Case(tp=4, sequence_parallel=True, sequence=36, model=ONE_KV_HEAD | BIASES),
    Case(tp=2, dp=2, zero=3, sequence_parallel=True, sequence=34),
    Case(tp=2, pp=2, dp=2, sequence_parallel=True, sequence=34, accumulation=2, model=TIED),
    # recompute, on the first stage (integer inputs) as on others
    Case(recompute="full", model=TIED),
    Case(dp=2, zero=3, recompute="full"),
    Case(tp=2, pp=2, recompute="full", accumulation=4, document_mask=True),
    Case(tp=2, pp=2, recompute="selective", sequence_parallel=True, sequence=34, model=BIASES),
    # a head tied to the embedding, on one stage and across two
    Case(dp=2, zero=3, model=TIED),
    Case(pp=2, model=TIED),
    Case(pp=2, dp=2, accumulation=2, model=TIED),
    Case(tp=2, pp=2, model=TIED),
    # fewer key/value heads than ranks; a vocabulary so small that a rank holds only padding
    Case(tp=4, model=ONE_KV_HEAD),
    Case(tp=4, model={"vocab_size": 5}),
    Case(tp=4, pp=2, model={"vocab_size": 5} | TIED | ONE_KV_HEAD),
    # packed documents
    Case(tp=2, document_mask=True),
    Case(pp=3, accumulation=4, document_mask=True),
    Case(tp=2, pp=2, dp=2, sequence_parallel=True, sequence=34, document_mask=True),
    # a replica, and a micro-batch, without a single valid token
    Case(dp=2, rows_without_loss=3),
    Case(pp=2, accumulation=2, rows_without_loss=3),
]


@dataclass(frozen=True)
class Trained:
    """A case's run by our engine on all its ranks, and by transformers."""

    case: Case
    ranks: list[dict[str, Any]]
    weights: dict[str, np.ndarray]
    reference: Reference


def trained(*cases: Case) -> list[Trained]:
    """Runs the cases, which need the same number of ranks, one after another in the same ranks."""
    by_rank = run_ranks(train_all, cases[0].world_size, list(cases))
    by_case = [[rank[index] for rank in by_rank] for index in range(len(cases))]
    return [Trained(case, ranks, assemble(ranks), reference(case)) for case, ranks in zip(cases, by_case, strict=True)]


def assert_losses_and_norms_equal(run: Trained) -> None:
    for rank, seen in enumerate(run.ranks):
        np.testing.assert_allclose(seen["losses"], run.reference.losses, RELATIVE, err_msg=f"{run.case} rank {rank}")
        np.testing.assert_allclose(seen["norms"], run.reference.norms, RELATIVE, err_msg=f"{run.case} rank {rank}")


def assert_updates_equal(run: Trained) -> None:
    """What every weight moved by in all steps, which under SGD is the sum of its clipped gradients."""
    assert run.weights.keys() == run.reference.final.keys(), f"{run.case}: names of weights"
    wrong = {}
    for name, expected in run.reference.final.items():
        update = np.abs(expected - run.reference.initial[name]).max()
        allowed = SGD_UPDATE * update + run.case.steps * ROUNDING * np.abs(expected).max()
        difference = np.abs(run.weights[name] - expected).max()
        if not difference <= allowed:
            wrong[name] = f"off by {difference / update:.1e} of its update"
    assert not wrong, f"{run.case}: {wrong}"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The reference's matrices are tiny: a second thread only spins on a core that ranks of other tests want."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> Iterator[dict[str, Trained]]:
    cases = [request.param.with_optimizer(name) for name in ("adamw", "sgd")]
    return dict(zip(("adamw", "sgd"), trained(*cases), strict=True))


def test_adamw_steps_equal_transformers(layout: dict[str, Trained]) -> None:
    run = layout["adamw"]
    assert_losses_and_norms_equal(run)
    assert run.weights.keys() == run.reference.final.keys(), f"{run.case}: names of weights"
    largest = max(np.abs(weight).max() for weight in run.reference.final.values())
    for name, expected in run.reference.final.items():
        difference = np.abs(run.weights[name] - expected).max()
        assert difference <= ADAMW_WEIGHT * largest, f"{run.case}: {name} off by {difference:.1e}"


def test_sgd_updates_under_a_biting_clip_equal_transformers(layout: dict[str, Trained]) -> None:
    run = layout["sgd"]
    assert min(run.reference.norms) > run.case.clip, "the clip must bite at every step"
    assert_losses_and_norms_equal(run)
    assert_updates_equal(run)


def test_ten_steps_on_all_axes() -> None:
    (run,) = trained(Case(tp=2, pp=2, dp=2, steps=10))
    assert_losses_and_norms_equal(run)


@pytest.mark.parametrize("clip", [100.0, 0.0], ids=["too high to bite", "off"])
@pytest.mark.parametrize("layout", [Case(tp=2, dp=2, zero=2), Case(tp=2, pp=2)], ids=str)
def test_gradients_that_are_not_clipped(layout: Case, clip: float) -> None:
    # an engine that always scales to the clip passes every test above
    case = replace(layout, optimizer="sgd", learning_rate=0.02, weight_decay=0.0, clip=clip)
    (run,) = trained(case)
    assert max(run.reference.norms) < 100.0
    assert_losses_and_norms_equal(run)
    assert_updates_equal(run)


@pytest.mark.parametrize(
    "layout",
    [
        Case(tp=2, dtype="bf16"),
        Case(pp=2, tp=2, dtype="bf16", accumulation=2),
        Case(dp=2, zero=2, dtype="bf16", accumulation=2),
        Case(dp=2, zero=3, dtype="bf16"),
        Case(tp=2, pp=2, dtype="bf16", model=TIED),
    ],
    ids=str,
)
def test_bf16_is_as_near_to_fp32_as_transformers(layout: Case) -> None:
    runs = trained(layout, layout.with_optimizer("sgd"))
    exacts = [reference(replace(run.case, dtype="fp32")) for run in runs]
    # the largest of six draws: a single run's may be small by luck
    their_loss = max(
        np.abs(np.subtract(run.reference.losses, exact.losses)).max() for run, exact in zip(runs, exacts, strict=True)
    )
    for run, exact in zip(runs, exacts, strict=True):
        for seen in run.ranks:
            ours = np.abs(np.subtract(seen["losses"], exact.losses)).max()
            assert ours <= BF16_OF_TRANSFORMERS * their_loss, f"{run.case}: losses {ours:.1e}, theirs {their_loss:.1e}"
            np.testing.assert_allclose(seen["norms"], exact.norms, BF16_NORM, err_msg=str(run.case))
        if run.case.optimizer == "adamw":
            continue  # it moves each weight by the sign of its gradient, and bf16 noise decides the sign of small ones
        for name in exact.final:
            update = exact.final[name] - exact.initial[name]
            # from the bf16 starting point
            ours = np.linalg.norm(run.weights[name] - run.reference.initial[name] - update)
            theirs = np.linalg.norm(run.reference.final[name] - run.reference.initial[name] - update)
            assert ours <= BF16_OF_TRANSFORMERS * theirs, f"{run.case}: {name} {ours:.1e}, theirs {theirs:.1e}"


def _evaluate_and_train(rank: int, case: Case) -> dict[str, Any]:
    engine = engine_of(case)
    (batch,) = global_batches(case)
    mine = micro_batches_of(engine, case, batch)
    before = local_weights(engine)
    evaluated = float(engine.evaluate(mine, case.accumulation))
    after = local_weights(engine)
    unchanged = all(np.array_equal(a[-1], b[-1]) for a, b in zip(before, after, strict=True))
    trained_loss = float(engine.train_step(mine, case.learning_rate).loss)
    return {"evaluated": evaluated, "trained": trained_loss, "unchanged": unchanged}


@pytest.mark.parametrize(
    "case", [Case(dp=2, zero=3, accumulation=2, steps=1), Case(tp=2, pp=2, dp=2, accumulation=2, steps=1)], ids=str
)
def test_evaluation_is_the_token_mean_and_trains_nothing(case: Case) -> None:
    expected = reference(case).losses[0]
    for rank, seen in enumerate(run_ranks(_evaluate_and_train, case.world_size, case)):
        assert seen["unchanged"], f"{case}: evaluation changed weights of rank {rank}"
        np.testing.assert_allclose([seen["evaluated"], seen["trained"]], expected, RELATIVE, err_msg=str(case))
