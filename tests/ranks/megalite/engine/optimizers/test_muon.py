"""Muon in an engine: its state goes on in a checkpoint, and a step that must change nothing changes nothing.

What it computes is compared with torch's own in tests/ranks/launch/parity/test_optimizers.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.reader import CheckpointReader
from megalite.engine.optimizers.muon import Muon
from tests.helpers.engine_cases import Case, engine_of, trained_steps
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import save

SMALL = {"num_hidden_layers": 2}
MUON = Case(optimizer="muon", model=SMALL, steps=4, global_batch=6, bucket=3000)
SAVED_AT = 2
Numbers = list[tuple[float, float]]


def _uninterrupted(rank: int, case: Case, root: Path) -> tuple[Numbers, str | None]:
    engine = engine_of(case)
    trained_steps(engine, case, 0, SAVED_AT)
    failure = save(engine, root, SAVED_AT, background=case.dp == 1).failure
    return trained_steps(engine, case, SAVED_AT, case.steps), failure


def _resumed(rank: int, case: Case, folder: Path) -> Numbers:
    engine = engine_of(replace(case, seed=case.seed + 1))
    load_engine(engine, CheckpointReader(folder), weights_only=False)
    return trained_steps(engine, case, SAVED_AT, case.steps)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (replace(MUON, tp=2), replace(MUON, dp=3, micro_batch=2, zero=2)),
        (
            replace(MUON, optimizer="adamw", dp=2, optimizer_options={"moments_dtype": "bf16"}),
            replace(MUON, optimizer="adamw", tp=2),
        ),
    ],
    ids=["muon", "adamw in bf16"],
)
def test_a_checkpoint_goes_on_to_the_bit_and_on_another_layout(before: Case, after: Case, tmp_path: Path) -> None:
    """Moments that start at zero again would move the next loss by 1e-2. On another layout a sum in another order may
    decide the last bit of Muon's bf16, 1e-4 of a loss; from bf16 moments an fp32 run goes on exactly."""
    whole, failures = zip(*run_ranks(_uninterrupted, before.world_size, before, tmp_path), strict=True)
    assert set(failures) == {None}
    folder = tmp_path / f"step_{SAVED_AT:08d}"
    assert run_ranks(_resumed, before.world_size, before, folder) == list(whole), "not equal to the bit"
    for numbers in run_ranks(_resumed, after.world_size, after, folder):
        assert numbers == [pytest.approx(step, rel=1e-3) for step in whole[0]]
    manifest = CheckpointReader(folder).manifest
    kept = {manifest.kinds_of(name) for name in manifest.tensors}
    adamw, muon = ("weight", "exp_avg", "exp_avg_sq"), ("weight", "momentum_buffer")
    assert kept == ({adamw, muon} if before.optimizer == "muon" else {adamw})


def _skipped_and_scaled(rank: int, case: Case) -> dict[str, Any]:
    engine = engine_of(case)
    trained_steps(engine, case, 0, 1)
    optimizer = engine.torch_optimizer
    assert isinstance(optimizer, Muon)
    partitions = [group["params"][0] for group in optimizer.param_groups]

    def state() -> list[torch.Tensor]:
        moments = [value for partition in partitions for value in optimizer.state[partition].values()]
        return [tensor.detach().clone() for tensor in (*partitions, *moments)]

    def step(factor: float) -> list[torch.Tensor]:
        for number, partition in enumerate(partitions):
            draw = torch.Generator().manual_seed(number)
            partition.grad = factor * torch.randn(len(partition), generator=draw)
        optimizer.step()
        return state()

    def put_back(tensors: list[torch.Tensor]) -> None:
        moments = [value for partition in partitions for value in optimizer.state[partition].values()]
        for tensor, value in zip((*partitions, *moments), tensors, strict=True):
            tensor.detach().copy_(value)

    before = state()
    optimizer.grad_scale = None
    optimizer.found_inf = torch.tensor(1.0)
    skipped = step(float("nan"))
    optimizer.found_inf = torch.tensor(0.0)
    plain = step(1.0)
    put_back(before)
    optimizer.grad_scale = torch.tensor(8.0)
    scaled = step(8.0)
    return {
        "skipped": all(map(torch.equal, before, skipped)),
        "moved": [bool((a != b).any()) for a, b in zip(before, plain, strict=True)],
        "scaled": all(map(torch.equal, plain, scaled)),
    }


def test_a_step_that_found_infinity_changes_nothing_and_gradients_are_unscaled() -> None:
    case = replace(MUON, dp=2, optimizer_options={"moments_dtype": "bf16"})
    for seen in run_ranks(_skipped_and_scaled, 2, case):
        assert seen["skipped"] and seen["scaled"] and all(seen["moved"]), seen
