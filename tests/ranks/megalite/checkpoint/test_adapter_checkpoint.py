"""A checkpoint of a run with adapters: whole, without optimizer state of frozen weights, and good for any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.merged_reader import MergedReader
from megalite.checkpoint.reader import CheckpointReader
from megalite.engine.engine import Engine
from megalite.parallel.adapters import is_factor
from tests.helpers.engine_cases import Case, assemble, engine_of, global_batches, local_weights, micro_batches_of
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import save

LORA = {"name": "lora", "rank": 3, "alpha": 7.0}
SAVED_AT = 2
CASE = Case(adapter=LORA, dtype="bf16", model={"num_hidden_layers": 2}, steps=4, global_batch=6, learning_rate=0.05)


def _steps(engine: Engine, case: Case, first: int, last: int) -> list[float]:
    fed = [micro_batches_of(engine, case, batch) for batch in global_batches(case)[first:last]]
    return [float(engine.train_step(micro_batches, case.learning_rate).loss) for micro_batches in fed]


def _uninterrupted(rank: int, case: Case, root: Path) -> dict[str, Any]:
    engine = engine_of(case)
    _steps(engine, case, 0, SAVED_AT)
    config = case.config().model_dump(mode="json")
    assert save(engine, root, SAVED_AT, background=True, config=config).failure is None
    saved = local_weights(engine)
    return {"losses": _steps(engine, case, SAVED_AT, case.steps), "weights": saved}


def _resumed(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    engine = engine_of(replace(case, seed=case.seed + 1))
    load_engine(engine, CheckpointReader(folder), weights_only=False)
    loaded = local_weights(engine)
    return {"losses": _steps(engine, replace(case, seed=case.seed), SAVED_AT, case.steps), "weights": loaded}


def _started_from(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    engine = engine_of(case)
    load_engine(engine, MergedReader(folder), weights_only=True)
    return {"weights": local_weights(engine)}


def test_a_run_with_adapters_resumes_on_another_layout_and_merges(tmp_path: Path) -> None:
    """Weights of another seed, moments that begin at zero, or a half that one replica does not write would show at
    once; bf16 rounds sums in another order, 1e-2 of a loss."""
    before = replace(CASE, dp=2, sequence=34)
    first = run_ranks(_uninterrupted, before.world_size, before, tmp_path)
    folder, after = tmp_path / f"step_{SAVED_AT:08d}", replace(CASE, tp=2, sequence_parallel=True, sequence=34)
    again = run_ranks(_resumed, before.world_size, before, folder)
    assert again[0]["losses"] == first[0]["losses"], "not equal to the bit"
    moved = run_ranks(_resumed, after.world_size, after, folder)
    assert moved[0]["losses"] == pytest.approx(first[0]["losses"], rel=1e-2)
    saved = assemble(first)
    for results in (again, moved):
        loaded = assemble(results)
        assert all(np.array_equal(loaded[name], value) for name, value in saved.items())

    reader = MergedReader(folder)
    kinds = {is_factor(name): reader.manifest.kinds_of(name) for name in reader.manifest.tensors}
    assert kinds == {True: ("weight", "exp_avg", "exp_avg_sq"), False: ("weight",)}
    assert not any(map(is_factor, reader.shapes))
    for name in reader.shapes:
        a, b = (saved.get(f"{name.rpartition('.')[0]}.{factor}") for factor in ("lora_A", "lora_B"))
        merged = saved[name] if a is None or b is None else saved[name] + 7.0 / 3 * b.astype(np.float64) @ a
        assert np.allclose(reader.read(name).numpy(), merged, atol=1e-6), name
        assert a is None or np.abs(merged - saved[name]).max() > 1e-4, f"{name} is not adapted"
    wide = replace(CASE, dtype="fp32", dp=2, zero=2)
    for case in (wide, replace(wide, adapter={})):
        started = assemble(run_ranks(_started_from, case.world_size, case, folder))
        for name, value in started.items():
            if not is_factor(name):
                assert torch.equal(torch.from_numpy(value), reader.read(name)), name
            elif name.endswith("lora_B"):
                assert not value.any(), "adapters begin anew beside merged weights"
