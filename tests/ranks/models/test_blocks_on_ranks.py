"""Models with blocks of every kind cut over ranks, and trained by both engines, against themselves on one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import named_shards
from tests.helpers.engine_cases import Case, assemble, engine_of, global_batches, local_weights, micro_batches_of
from tests.helpers.rank_pool import run_ranks
from tests.helpers.replicated_gradients import sum_parts
from tests.unit.models.test_blocks import EXPERTS, GEMMA2, GPT2, KV, NEOX, OLMO2, PACKED, SIZES, SLIDING, TOKENS, built

CUT = [
    GEMMA2 | KV,
    OLMO2 | KV,
    NEOX | {"use_parallel_residual": True},
    GPT2 | {"embedding_dropout": 0.2, "residual_dropout": 0.1},
    EXPERTS | KV | {"mlp_only_layers": [1], "norm_placement": "pre_and_post", "residual_dropout": 0.1},
]
NEAR = 1e-11  # float64, sums in another order, through three blocks


def _on_rank(rank: int, tp_size: int, cases: list[tuple[int, bool, bool]]) -> list[dict[str, Any]]:
    seen = []
    for number, packed, sequence_parallel in cases:
        tp = TensorParallel(tp_size, rank, dist.group.WORLD if tp_size > 1 else None, sequence_parallel)
        ours = built(ModelConfig.model_validate(SIZES | CUT[number]), tp).double()
        tokens, positions = TOKENS[:, :32], PACKED[:, :32]
        hidden, _ = ours(tokens, positions if packed else None, torch.arange(2))
        direction = torch.randn(2, 32, 48, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        if tp.sequence_is_cut:
            direction = direction.chunk(tp_size, dim=1)[rank]
        (hidden * direction).sum().backward()
        sum_parts(ours, tp)
        gradients = [
            (piece.name, piece.source, parameter.grad[piece.target])  # type: ignore[index]
            for name, parameter in named_shards(ours)
            if parameter.grad is not None  # an untied head is not on the way
            for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
        ]
        seen.append({"hidden": hidden.detach(), "gradients": gradients})
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [2, 4])
def test_cut_models_are_the_whole_ones(tp_size: int) -> None:
    both = (False, True) if tp_size == 2 else (True,)
    cases = [(number, packed, packed ^ (number % 2 == 0)) for number in range(len(CUT)) for packed in both]
    ranks = run_ranks(_on_rank, tp_size, tp_size, cases)
    for case, serial, *seen in zip(cases, _on_rank(0, 1, cases), *ranks, strict=True):
        parts = [rank["hidden"] for rank in seen]
        for part in [torch.cat(parts, dim=1)] if case[2] else parts:
            torch.testing.assert_close(part, serial["hidden"], atol=NEAR, rtol=0, msg=f"hidden of {case}")
        expected = {name: gradient for name, _, gradient in serial["gradients"]}
        missing = set(expected)
        for name, source, gradient in (piece for rank in seen for piece in rank["gradients"]):
            want = expected[name][source]
            # of the keys' bias all scores shift alike, where nothing is rotated: rounding is its gradient
            near = NEAR * float(expected[name.replace("k_proj.bias", "q_proj.bias")].abs().max())
            torch.testing.assert_close(gradient, want, atol=near, rtol=0, msg=f"{name} of {case}")
            missing.discard(name)
        assert not missing


BASE = Case(sequence=12, micro_batch=1, steps=2, optimizer="sgd", learning_rate=0.1)
KINDS: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA2 | {"layer_types": [*SLIDING, *SLIDING[:2]], "max_position_embeddings": 40},
    "gpt2": GPT2 | {"num_key_value_heads": 4, "max_position_embeddings": 40},
}
TRAININGS = [
    ("gemma2", replace(BASE, pp=2, accumulation=2)),
    ("gemma2", replace(BASE, dp=2, zero=3)),
    ("gpt2", replace(BASE, pp=2, accumulation=2)),
    ("gpt2", replace(BASE, tp=2, micro_batch=2, sequence_parallel=True)),
]


def _trained(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Each case's weights after its steps, and the losses."""
    results = []
    for case in cases:
        engine = engine_of(case)
        losses = [
            float(engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate).loss)
            for batch in global_batches(case)
        ]
        results.append({"weights": local_weights(engine), "losses": losses})
    return results


@pytest.mark.slow
def test_engines_train_tied_capped_models_and_learned_positions_alike() -> None:
    """Catches a cap that only one engine knows, and positions that a tied stage adds twice or not at all."""
    serial = {kind: replace(BASE, micro_batch=2, model=model) for kind, model in KINDS.items()}
    expected = dict(zip(serial, run_ranks(_trained, 1, list(serial.values()))[0], strict=True))
    cut = [replace(case, model=KINDS[kind]) for kind, case in TRAININGS]
    for (kind, case), *ranks in zip(TRAININGS, *run_ranks(_trained, 2, cut), strict=True):
        want, found = assemble([expected[kind]]), assemble(ranks)
        assert found.keys() == want.keys()
        np.testing.assert_allclose(ranks[0]["losses"], expected[kind]["losses"], rtol=1e-6)
        for name, weight in want.items():
            # fp32 gradients of weights about 0.1, summed in another order, over two steps
            np.testing.assert_allclose(found[name], weight, atol=2e-6, rtol=0, err_msg=f"{kind} {case}: {name}")
    for kind, case in serial.items():
        (batch, *_), model = global_batches(case), case.config().model
        ours = built(model, seed=case.seed, spread=model.initializer_range)
        hidden, head = ours(torch.from_numpy(batch.tokens))
        logits, cap = hidden @ head.t(), model.final_logit_softcapping
        logits = logits if cap is None else cap * (logits / cap).tanh()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        np.testing.assert_allclose(expected[kind]["losses"][0], float(loss.detach()), rtol=1e-6)
