"""Recomputation that differs from stage to stage: what runs again, and that no number changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from models.decoder import DecoderBlock
from tests.helpers.engine_cases import Case, assemble, engine_of, global_batches, local_weights, micro_batches_of
from tests.helpers.rank_pool import run_ranks

SERIAL = Case(accumulation=4, micro_batch=2, clipping=0.05, model={"num_hidden_layers": 6})
CASES = [
    replace(SERIAL, pp=2, recompute=("full", "none")),
    replace(SERIAL, pp=2, recompute=("none", "full"), schedule="zb-v"),  # the first stage has the first and last blocks
]
PLAIN = [replace(case, recompute="none") for case in CASES]


def _count(calls: Counter[str], name: str, *_: Any) -> None:
    calls[name] += 1


def _trained(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Weights and norms after all steps, and how often the feed-forward part of each block began to compute."""
    results = []
    for case in cases:
        engine, calls = engine_of(case), Counter[str]()
        for block in engine.deepspeed.module.modules():
            if isinstance(block, DecoderBlock):
                # recomputation stops inside of it, at the last number that backward needs
                block.mlp.register_forward_pre_hook(partial(_count, calls, block.layer_name))
        norms = [
            float(engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate).grad_norm)
            for batch in global_batches(case)
        ]
        results.append({"weights": local_weights(engine), "norms": norms, "calls": dict(calls)})
        engine.deepspeed.destroy()
    return results


def test_stages_recompute_what_they_are_told_and_nothing_changes() -> None:
    """Equal to the bit to stages that recompute nothing, and to one process within the rounding of sums in another
    order, which AdamW's first steps enlarge to a fraction of the learning rate; the clip bites in every step."""
    (serial,) = run_ranks(_trained, 1, [SERIAL])[0]
    assert min(serial["norms"]) > SERIAL.clipping
    stages = [list(found) for found in zip(*run_ranks(_trained, 2, CASES + PLAIN), strict=True)]
    once = SERIAL.steps * SERIAL.accumulation
    for case, ranks, plain in zip(CASES, stages[: len(CASES)], stages[len(CASES) :], strict=True):
        for mode, rank in zip(case.recompute, ranks, strict=True):
            assert set(rank["calls"].values()) == {2 * once if mode == "full" else once}, f"{case}: {rank['calls']}"
        assert sum(len(rank["calls"]) for rank in ranks) == 6, "every block is on one stage"
        assert [rank["norms"] for rank in ranks] == [rank["norms"] for rank in plain], case
        weights, kept = assemble(ranks), assemble(plain)
        for name, value in assemble([serial]).items():
            assert np.array_equal(weights[name], kept[name]), f"{case}: {name}"
            assert np.abs(weights[name] - value).max() <= 1e-2 * SERIAL.steps * SERIAL.learning_rate, f"{case}: {name}"
