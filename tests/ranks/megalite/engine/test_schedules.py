"""Gradient norms, evaluation and logits under every schedule.

The reference is the same model on one process; that one is right is shown by `tests/ranks/launch/parity`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.engine_cases import Batch, Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks

# a weight on two stages, and a key/value head that two tensor-parallel ranks share
MODEL = {"tie_word_embeddings": True, "num_key_value_heads": 1}
# with seed 7 a gradient nearly cancels, whose rounding AdamW makes a whole step
SERIAL = Case(accumulation=4, micro_batch=2, document_mask=True, model=MODEL, seed=11)
SCHEDULES = [
    replace(SERIAL, pp=2, schedule="1f1b", zero=2),
    replace(SERIAL, pp=2, schedule="interleaved"),
    replace(SERIAL, pp=2, schedule="zero-bubble"),
    replace(SERIAL, pp=2, schedule="zb-v", zero=2),
    replace(SERIAL, pp=2, schedule="dualpipev"),
]
FOLDED = replace(SERIAL, tp=2, pp=2, schedule="zb-v")
COUNTS = 1, 3, 5  # micro-batches of an evaluation; not all of them could be trained with
SHAPES = (1, 7), (3, 33), (2, 36)  # of tokens whose logits are asked for


def _answers(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """The norm, losses of evaluations and logits, after a step of training and again after another."""
    answers = []
    for case in cases:
        engine = engine_of(case)
        seen: dict[str, Any] = {"norms": [], "losses": [], "logits": []}
        batches = global_batches(replace(case, global_batch=5 * case.micro_batch, steps=1))
        parts = [batches[0].rows(slice(2 * i, 2 * i + 2)) for i in range(5)]
        draw = np.random.default_rng(3)
        for batch in global_batches(case)[:2]:
            result = engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
            seen["norms"].append(float(result.grad_norm))
            for count in COUNTS:
                held_out = parts[:count] if engine.needs_data else []
                seen["losses"].append(float(engine.evaluate(held_out, count)))
                assert float(engine.evaluate(held_out, count, lambda done: 2)) == seen["losses"][-1], "in parts"
            for shape in SHAPES:
                tokens = draw.integers(0, 131, shape)
                positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
                logits = engine.logits(Batch(tokens, tokens, positions, np.arange(shape[0])))
                seen["logits"].append(None if logits is None else logits.float().numpy().copy())
        answers.append(seen)
        engine.deepspeed.destroy()
    return answers


@pytest.mark.parametrize("cases", [SCHEDULES, [FOLDED]], ids=["all", "with tensor parallelism"])
def test_norms_evaluation_and_logits_under_every_schedule(cases: list[Case]) -> None:
    """Sums in another order: 2e-5 of a loss or norm and of the largest logit after a step that AdamW has rounded up.

    A norm that counts the tied weight on both of its stages is a tenth off, and so is one of key/value gradients that
    ranks have not summed, be it in the second half of a folded model alone."""
    (expected,) = run_ranks(_answers, 1, [SERIAL])[0]
    ranks = run_ranks(_answers, cases[0].world_size, cases)
    for case, *seen in zip(cases, *ranks, strict=True):
        for rank in seen:
            assert rank["norms"] == pytest.approx(expected["norms"], rel=2e-5), case
            assert rank["losses"] == pytest.approx(expected["losses"], rel=2e-5), case
        for number, truth in enumerate(expected["logits"]):
            found = [rank["logits"][number] for rank in seen if rank["logits"][number] is not None]
            assert len(found) == case.tp, f"{case}: one stage holds the head"
            for logits in found:
                assert logits.shape == truth.shape
                assert np.abs(logits - truth).max() <= 2e-5 * np.abs(truth).max(), case
