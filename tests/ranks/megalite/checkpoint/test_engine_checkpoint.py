"""What a checkpoint of a real engine must bring back, beside what the layout matrix looks at."""

from __future__ import annotations

import dataclasses
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint import writer
from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.manifest import find_latest
from megalite.checkpoint.reader import CheckpointReader
from tests.helpers.engine_cases import Case, assemble, engine_of, local_weights, trained_steps
from tests.helpers.rank_pool import run_fresh_ranks, run_ranks
from tests.helpers.saving import save

STEPS, SAVED_AT, BATCH = 5, 2, 6


def uninterrupted(rank: int, case: Case, root: Path) -> dict[str, Any]:
    """All steps in one go, saving on the way."""
    engine = engine_of(case)
    numbers = trained_steps(engine, case, 0, SAVED_AT)
    assert save(engine, root, SAVED_AT, background=True).failure is None
    return {"numbers": numbers + trained_steps(engine, case, SAVED_AT, STEPS), "weights": local_weights(engine)}


def resumed(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    """The steps after the checkpoint, in a new engine that started from other weights."""
    engine = engine_of(dataclasses.replace(case, seed=case.seed + 1))
    load_engine(engine, CheckpointReader(folder), weights_only=False)
    return {"numbers": trained_steps(engine, case, SAVED_AT, STEPS), "weights": local_weights(engine)}


def went_on(rank: int, case: Case, folder: Path) -> list[tuple[float, float]]:
    """The losses and norms after the checkpoint, in a new engine with the run's seed."""
    engine = engine_of(case)
    load_engine(engine, CheckpointReader(folder), weights_only=False)
    return trained_steps(engine, case, SAVED_AT, STEPS)


EXPERTS = {"num_experts": 4, "moe_intermediate_size": 29, "mlp_only_layers": [1]}
DEALT = {
    "whole": Case(),
    "to 4": Case(dp=2, cp=2, cp_kind="all_gather", ep=4),
    "to 2, in stages": Case(pp=2, dp=2, ep=2, zero=2, micro_batch=1, schedule="zero-bubble"),
    "cut": Case(tp=2),
}


def went_on_from_all(rank: int, case: Case, folders: dict[str, Path]) -> dict[str, list[tuple[float, float]]]:
    """In one engine, one after the other."""
    engine, found = engine_of(dataclasses.replace(case, seed=case.seed + 1)), {}
    for name, folder in folders.items():
        load_engine(engine, CheckpointReader(folder), weights_only=False)
        found[name] = trained_steps(engine, case, SAVED_AT, STEPS)
    return found


@pytest.mark.slow
def test_experts_go_on_wherever_they_are_dealt_to(tmp_path: Path) -> None:
    """A rank saves and loads the experts that it holds, by names that no layout changes."""
    sizes = {"steps": STEPS, "global_batch": BATCH, "sequence": 36, "model": EXPERTS}
    cases = {name: dataclasses.replace(case, **sizes) for name, case in DEALT.items()}
    folders, whole = {}, {}
    for name, case in cases.items():
        whole[name] = run_ranks(uninterrupted, case.world_size, case, tmp_path / name)[0]["numbers"][SAVED_AT:]
        folders[name] = tmp_path / name / f"step_{SAVED_AT:08d}"
    for name, case in cases.items():
        for source, numbers in run_ranks(went_on_from_all, case.world_size, case, folders)[0].items():
            expected = whole[name] if source == name else [pytest.approx(step, rel=2e-5) for step in whole[source]]
            assert numbers == expected, f"{source} -> {name}"


@pytest.mark.slow
def test_dropout_goes_on_on_another_layout_with_the_same_masks(tmp_path: Path) -> None:
    """Nothing about dropout is saved: masks come from the sample numbers, which go on where the run stood. With those
    of the first steps again, or of a fresh generator, losses would be off by 1e-2; 2e-5 is sums in another order."""
    dropout = {"attention_dropout": 0.2, "residual_dropout": 0.1, "embedding_dropout": 0.15}
    before = Case(dp=2, zero=3, steps=STEPS, global_batch=BATCH, model=dropout)
    after = Case(tp=2, pp=2, dp=2, steps=STEPS, global_batch=BATCH, model=dropout)
    whole = run_ranks(uninterrupted, before.world_size, before, tmp_path)[0]["numbers"]
    for rank, numbers in enumerate(run_ranks(went_on, after.world_size, after, tmp_path / f"step_{SAVED_AT:08d}")):
        assert numbers == [pytest.approx(step, rel=2e-5) for step in whole[SAVED_AT:]], f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, tp=2, dtype="bf16", model={"tie_word_embeddings": True}),
        Case(dp=2, zero=2, dtype="bf16"),
        Case(dp=2, zero=3, dtype="bf16"),
        Case(dp=2, ep=2, dtype="bf16", model=EXPERTS),
        Case(pp=2, optimizer="sgd"),
    ],
    ids=str,
)
def test_a_resume_on_the_same_layout_is_bit_identical(case: Case, tmp_path: Path) -> None:
    """bf16 keeps fp32 masters that the compute weights do not determine: they must come back to the bit."""
    case = dataclasses.replace(case, steps=STEPS, global_batch=BATCH)
    first = run_ranks(uninterrupted, case.world_size, case, tmp_path)
    second = run_ranks(resumed, case.world_size, case, tmp_path / f"step_{SAVED_AT:08d}")
    assert second[0]["numbers"] == first[0]["numbers"][SAVED_AT:]
    before, after = assemble(first), assemble(second)
    assert all((after[name] == value).all() for name, value in before.items())


def test_a_resume_with_a_tied_weight_goes_on_from_the_first_stages_copy(tmp_path: Path) -> None:
    """Stages sum its gradient in another order, so its masters and moments differ; the first stage's are followed."""
    model = {"tie_word_embeddings": True, "vocab_size": 2048}
    case = Case(pp=2, dp=3, micro_batch=1, dtype="bf16", model=model, steps=STEPS, global_batch=BATCH)
    first = run_ranks(uninterrupted, case.world_size, case, tmp_path)
    second = run_ranks(resumed, case.world_size, case, tmp_path / f"step_{SAVED_AT:08d}")
    assert second[0]["numbers"] == first[0]["numbers"][SAVED_AT:]


def save_where_rank_0_cannot_write(rank: int, case: Case, root: Path) -> str:
    """Rank 0 may write 10 kB per file: its save fails in the middle of its files."""
    engine = engine_of(case)
    trained_steps(engine, case, 0, 1)
    writer.FILE_BYTES = 1000
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    return save(engine, root, 1).failure or "saved"


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(dp=2), Case(tp=2, pp=2)], ids=str)
def test_a_save_that_fails_on_one_rank_is_told_on_all(case: Case, tmp_path: Path) -> None:
    """A rank that left the loop early would leave its peers waiting until the timeout."""
    told = run_fresh_ranks(
        save_where_rank_0_cannot_write, case.world_size, dataclasses.replace(case, steps=1), tmp_path
    )
    assert all(sentence == told[0] for sentence in told)
    assert "rank_00000" in told[0] and "cannot be written" in told[0]
    assert find_latest(tmp_path)[0] is None and not list(tmp_path.glob(".*")), "nothing half-written stays"
