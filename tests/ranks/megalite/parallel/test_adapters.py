"""Training with adapters on many layouts computes what peft computes on one process, from the same random factors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from launch.parity.observations import ArrayBlock
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import reading_gradients, refresh, write_weight
from models.families import hf_config
from tests.helpers.engine_cases import (
    WEIGHT,
    Case,
    assemble,
    engine_of,
    global_batches,
    local_weights,
    micro_batches_of,
)
from tests.helpers.rank_pool import run_ranks

LORA = {"name": "lora", "rank": 3, "alpha": 5.0}
# a clip that scales every step down: AdamW hides the scale of a gradient, plain SGD shows it
BASE = Case(adapter=LORA, global_batch=6, sequence=34, steps=3, clipping=0.05)
TIED = {"tie_word_embeddings": True}
LATENT = {
    **{"model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 14, "q_lora_rank": 18},
    **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7, "num_experts": 4, "n_shared_experts": 1},
    # all blocks dense, because transformers' experts are fused
    **{"mlp_only_layers": [0, 1, 2, 3, 4], "scoring_func": "sigmoid", "group_score": "top2_sum"},
    **{"e_score_correction_bias": True, "fp32_router": True},
}
OF_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
OPTIMIZERS = {"adamw": 1e-2, "sgd": 1.0}  # name -> learning rate


def targets(*names: str) -> dict[str, Any]:
    return LORA | {"targets": names}


CASES = [
    replace(BASE, tp=2, sequence_parallel=True, recompute="selective", micro_batch=2),
    replace(BASE, tp=2, dp=2, zero=2, micro_batch=1, adapter=targets("q_proj", "v_proj", "o_proj", "up_proj")),
    replace(BASE, pp=2, schedule="zero-bubble", micro_batch=2, model=TIED),
    replace(BASE, dp=2, bucket=500, micro_batch=3, adapter=targets("down_proj")),
    replace(BASE, tp=2, sequence_parallel=True, micro_batch=2, adapter=targets(*OF_LATENTS), model=LATENT),
]
MORE_CASES = [
    BASE,
    replace(BASE, tp=4, recompute="full"),  # fewer key/value heads than ranks
    replace(BASE, tp=4, sequence=36, sequence_parallel=True, adapter=targets("k_proj", "gate_proj")),
    replace(BASE, tp=2, pp=2, sequence_parallel=True, micro_batch=2),
    replace(BASE, pp=2, micro_batch=1, schedule="dualpipev", model=TIED),
    replace(BASE, pp=2, micro_batch=3, schedule="interleaved"),
    replace(BASE, tp=2, zero=2, micro_batch=3, sequence_parallel=True),
    replace(BASE, dp=3, micro_batch=2, zero=2),
    replace(BASE, dp=2, offload={"optimizer": "cpu"}),
    replace(BASE, tp=2, offload={"activations": "cpu"}),
    replace(BASE, tp=2, compile="blocks", sequence_parallel=True),
    replace(BASE, tp=2, pp=2, schedule="zero-bubble", adapter=targets("kv_a_proj_with_mqa", "o_proj"), model=LATENT),
]


def initial(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers of a weight by its name: B too, or A would have no gradient, and norms away from one."""
    key = hashlib.blake2b(name.encode(), digest_size=8).digest()
    drawn = np.random.default_rng(int.from_bytes(key, "little")).standard_normal(shape).astype(np.float32)
    return np.float32(0.1) * drawn + np.float32("norm" in name)


def fill(engine: Engine) -> None:
    for _, parameter in engine.parameters():
        value = torch.zeros(parameter.shard.local_shape)
        for piece in parameter.shard.pieces():
            value[piece.target] = torch.from_numpy(initial(piece.name, piece.shape)[piece.source])
        write_weight(parameter, value)
    refresh(engine)


def trained(rank: int, case: Case) -> dict[str, dict[str, Any]]:
    """What this rank sees of each optimizer's steps."""
    seen = {}
    for optimizer, rate in OPTIMIZERS.items():
        run = replace(case, optimizer=optimizer)
        engine = engine_of(run)
        fill(engine)
        gradients: list[ArrayBlock] = []

        def take(parameter: nn.Parameter, gradient: torch.Tensor, gradients: list[ArrayBlock] = gradients) -> None:
            gradients += [
                ArrayBlock(WEIGHT, piece.name, piece.shape, piece.source, gradient[piece.target].numpy().copy())
                for piece in parameter.shard.pieces()
            ]

        numbers = []
        for step, batch in enumerate(global_batches(run)):
            micro_batches = micro_batches_of(engine, run, batch)
            if step:
                result = engine.train_step(micro_batches, rate)
            else:
                with reading_gradients(engine, take):
                    result = engine.train_step(micro_batches, rate)
            numbers.append((float(result.loss), float(result.grad_norm)))
        frozen = [parameter for _, parameter in engine.parameters() if not parameter.requires_grad]
        assert frozen and all(parameter.grad is None for parameter in frozen)
        seen[optimizer] = {"numbers": numbers, "gradients": gradients, "weights": local_weights(engine)}
        engine.deepspeed.destroy()
    return seen


def ours(name: str) -> str:
    """Our name of one of peft's parameters."""
    return name.removeprefix("base_model.model.").replace(".default.weight", "").replace(".base_layer", "")


@cache
def reference(sequence: int, chosen: tuple[str, ...], model_options: str) -> dict[str, dict[str, Any]]:
    """Losses, norms, first gradients and last weights of peft's model of transformers' Llama."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    case = replace(BASE, sequence=sequence, model=json.loads(model_options))
    seen = {}
    for optimizer, rate in OPTIMIZERS.items():
        config = AutoConfig.for_model(**hf_config(case.config().model, "fp32"))
        options = LoraConfig(r=3, lora_alpha=5, target_modules=list(chosen) or "all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_config(config), options)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(torch.from_numpy(initial(ours(name), tuple(parameter.shape))))
        factors = {ours(name): parameter for name, parameter in parameters.items() if parameter.requires_grad}
        step = (
            torch.optim.SGD(factors.values(), lr=rate, weight_decay=0.1)
            if optimizer == "sgd"
            else torch.optim.AdamW(factors.values(), lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        )
        numbers, gradients = [], {}
        for batch in global_batches(case):
            logits = model(torch.from_numpy(batch.tokens)).logits.flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, torch.from_numpy(batch.targets).flatten())
            step.zero_grad()
            loss.backward()
            gradients = gradients or {name: factor.grad.numpy().copy() for name, factor in factors.items()}
            norm = nn.utils.clip_grad_norm_(factors.values(), case.clipping)
            assert norm > case.clipping, "the clip must bite"
            step.step()
            numbers.append((loss.item(), float(norm)))
        weights = {name: factor.detach().numpy().copy() for name, factor in factors.items()}
        seen[optimizer] = {"numbers": numbers, "gradients": gradients, "weights": weights}
    return seen


def worst(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray], start: bool) -> tuple[float, str]:
    """The largest difference over the largest entry, of weights over their largest change, and where it is."""
    change = {name: value - (initial(name, value.shape) if start else 0) for name, value in theirs.items()}
    scale = max(float(np.abs(value).max()) for value in change.values())
    return max((float(np.abs(mine[name] - value).max()) / scale, name) for name, value in theirs.items())


MORE = [pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE_CASES]


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_every_layout_trains_what_peft_trains(case: Case, one_thread: None) -> None:
    """A factor whose gradient is summed twice over tensor-parallel ranks, or not at all, is off by its own size; fp32
    sums in another order by 1e-6. AdamW moves an entry whose gradient is rounding by a part of the rate."""
    results = run_ranks(trained, case.world_size, case)
    theirs = reference(case.sequence, tuple(case.adapter.get("targets", ())), json.dumps(case.model))
    for optimizer, bound in (("sgd", 1e-4), ("adamw", 2e-2)):
        wanted = theirs[optimizer]
        for result in results:
            numbers = result[optimizer]["numbers"]
            assert numbers == [pytest.approx(step, rel=2e-5) for step in wanted["numbers"]], f"{case} {optimizer}"
        gradients = assemble([{"weights": result[optimizer]["gradients"]} for result in results])
        assert gradients.keys() == wanted["gradients"].keys(), "other parameters have gradients than peft trains"
        assert worst(gradients, wanted["gradients"], start=False) < (2e-5, "")
        weights = assemble([result[optimizer] for result in results])
        assert worst(weights, wanted["weights"], start=True) < (bound, "")
        for name in weights.keys() - wanted["weights"].keys():
            assert np.array_equal(weights[name], initial(name, weights[name].shape)), f"{name} has moved"
