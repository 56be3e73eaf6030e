"""Runs with compiled blocks or fused passes, by inductor, against eager ones on the same ranks: losses, norms, weights.

`tests/unit/models/test_compiled_blocks.py` has the graphs of all combinations; here a real compiler, engine and step.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config

from megalite.engine.compilation import fuse_passes, keep_compiled_code
from tests.helpers.engine_cases import Case, assemble, engine_of, global_batches, local_weights, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks

TINY = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 19, "vocab_size": 37}
LIMIT_S = 400.0  # of a compiler on a machine that is busy with other tests
CASE = Case(steps=2, micro_batch=2, sequence=12, model=TINY, optimizer="sgd", learning_rate=0.5)
COMPILED = [
    replace(CASE, document_mask=True),
    replace(CASE, tp=2, recompute="selective"),
    replace(CASE, tp=2, sequence_parallel=True, recompute="full", document_mask=True),
    replace(CASE, pp=2, accumulation=3),
    replace(CASE, dp=2, zero=2, accumulation=2),
    replace(CASE, dtype="bf16"),
]
EXPERTS = TINY | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
FUSED = [
    replace(CASE, accumulation=2, pp=2, schedule="zero-bubble"),
    replace(CASE, dp=2, zero=3),
    replace(CASE, recompute="full", offload={"activations": "cpu"}),
    replace(CASE, recompute="selective", model=TINY | {"residual_dropout": 0.1}),
    replace(CASE, tp=2, sequence_parallel=True, recompute="selective", model=EXPERTS),
    replace(CASE, dtype="fp16", model=TINY | {"normalization": "zero_centered_rmsnorm"}),
]


def _trained(rank: int, case: Case) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    # of three graphs: processes that compile beside this one would each import torch first
    torch._inductor.config.compile_threads = 1
    engine = engine_of(case)
    results = [
        engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate) for batch in global_batches(case)
    ]
    seen = {
        "numbers": [(float(result.loss), float(result.grad_norm)) for result in results],
        "weights": local_weights(engine),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "found": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
        "folder": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
    }
    engine.deepspeed.destroy()
    return seen


def _both(rank: int, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    return _trained(rank, replace(case, compile="none")), _trained(rank, replace(case, compile="blocks"))


def _both_ways(rank: int, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    eager = _trained(rank, case)
    with patch("megalite.engine.initialization.compile_blocks", lambda model, *_: fuse_passes(model)):  # as on a GPU
        few = _trained(rank, replace(case, steps=1))["graphs"]
        fused = _trained(rank, case)
    assert 1 <= few <= 9 and fused["graphs"] == few
    return eager, fused | {"graphs": 1}


def _check(case: Case, both: Any = _both) -> list[dict[str, Any]]:
    ranks = run_fresh_ranks(both, case.world_size, case, timeout_s=LIMIT_S)
    eager, compiled = ([each[which] for each in ranks] for which in (0, 1))
    bound = 2e-5 if case.dtype == "fp32" else 2e-2  # sums in another order; bf16: roundings that fusion leaves out
    assert [each["graphs"] for each in eager] == [0] * case.world_size
    assert all(each["graphs"] == 1 and not each["breaks"] for each in compiled)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(torch.tensor(other["numbers"]), torch.tensor(one["numbers"]), rtol=bound, atol=0)
    expected, found = assemble(eager), assemble(compiled)
    for name, weight in expected.items():
        assert abs(found[name] - weight).max() <= bound * abs(weight).max(), name
    return compiled


@pytest.mark.slow
def test_a_compiled_run_has_the_results_of_an_eager_one() -> None:
    """One layout, with collectives in the graph, and one that splits backward; `--exhaustive` has others."""
    _check(replace(CASE, tp=2, sequence_parallel=True))
    _check(FUSED[0], _both_ways)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", COMPILED + FUSED[1:], ids=str)
def test_other_compiled_runs_have_the_results_of_eager_ones(case: Case) -> None:
    _check(case, _both if case in COMPILED else _both_ways)


def _trained_with_cache(rank: int, case: Case) -> dict[str, Any]:
    os.environ["XDG_CACHE_HOME"] = case.cache
    keep_compiled_code()  # here, because `engine_of` restores the environment
    return _trained(rank, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tp", [1, 2])
def test_the_next_start_finds_compiled_code_in_the_users_cache(tp: int, tmp_path: Path) -> None:
    """Although torch has named a temporary folder before, when it was imported."""
    case = replace(CASE, tp=tp, cache=str(tmp_path), compile="blocks")
    runs = [run_fresh_ranks(_trained_with_cache, tp, case, timeout_s=LIMIT_S) for _ in range(2)]
    assert {each["folder"] for run in runs for each in run} == {f"{tmp_path}/megalite/compiled/inductor"}
    assert not any(each["found"] for each in runs[0][:1]) and all(each["found"] for each in runs[1])
