"""Router and experts against transformers' blocks, and cut over ranks against themselves on one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.config.sections import RouterConfig
from megalite.monitor.expert_usage import ExpertUsage
from megalite.parallel import linear
from megalite.parallel.collectives import Begun, RankGroup, TensorParallel
from megalite.parallel.expert_dispatch import RowMessages
from megalite.parallel.layers import LayerSpec, SerialModel, make_layer, named_shards
from models.decoder import decoder_layers
from models.experts import Router, SparseMLP
from tests.helpers.engine_cases import Case, assemble, engine_of, global_batches, local_weights, micro_batches_of
from tests.helpers.rank_pool import run_ranks

HIDDEN, SEQUENCE = 24, 12
SERIAL = TensorParallel()


def model_of(experts: int = 5, top_k: int = 2, size: int = 29, **options: Any) -> ModelConfig:
    """29 and 27 features divide by neither 2 nor 4 ranks."""
    sizes = {"vocab_size": 131, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": size}
    return ModelConfig.model_validate(sizes | {"intermediate_size": 50} | options)


def sparse_mlp(model: ModelConfig, tp: TensorParallel = SERIAL) -> nn.Module:
    """Weights depend on their global names and places only, so they are the same on any number of ranks."""
    return make_layer(LayerSpec("mlp", partial(SparseMLP, model), 0.0), tp, seed=3, initializer_range=0.4)


def hidden_states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What goes in, and the gradient of what comes out; both `[3, seq, hidden]`. The first feature is one."""
    draw = torch.Generator().manual_seed(8)
    x, direction = torch.randn(2, 3, SEQUENCE, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    x[..., 0] = 1.0
    return x.clone().requires_grad_(), direction.clone()


def degenerate(block: nn.Module, kind: str) -> None:
    """Makes routing degenerate: experts 1 and the last, which no token chooses, or equal probabilities."""
    router = block.gate.weight.data  # type: ignore[union-attr]
    if kind == "idle experts":
        router[1, 0] = router[-1, 0] = -30.0  # of logits about 2
    elif kind == "ties":
        router[1:] = router[0]
    elif kind == "one expert":
        router[:, 0] = -30.0
        router[-1, 0] = 30.0


def theirs_of(model: ModelConfig, family: str) -> nn.Module:
    # here, so that ranks do not import it
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2Moe
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    common = {"hidden_size": HIDDEN, "num_experts_per_tok": model.num_experts_per_tok, "hidden_act": model.hidden_act}
    if family == "mixtral":
        config = MixtralConfig(
            **common, intermediate_size=model.moe_intermediate_size, num_local_experts=model.num_experts
        )
        block: type[nn.Module] = MixtralSparseMoeBlock
    elif family.startswith("deepseek"):
        same = ("moe_intermediate_size", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")
        common |= {name: getattr(model, name) for name in (*same, "norm_topk_prob")}
        common |= {"num_attention_heads": 4, "n_routed_experts": model.num_experts}
        method = "greedy" if model.n_group == 1 else "group_limited_greedy"
        config = DeepseekV2Config(**common, topk_method=method) if "2" in family else DeepseekV3Config(**common)
        block = DeepseekV2Moe if "2" in family else DeepseekV3MoE
    else:
        config = Qwen3MoeConfig(
            **common,
            moe_intermediate_size=model.moe_intermediate_size,
            num_experts=model.num_experts,
            norm_topk_prob=model.norm_topk_prob,
        )
        block = Qwen3MoeSparseMoeBlock
    config._experts_implementation = "eager"
    return block(config)


def gradients_of(block: nn.Module) -> dict[str, Tensor]:
    """By canonical name; only where this rank holds the whole."""
    return {
        piece.name: parameter.grad[piece.target]  # type: ignore[index]
        for parameter in block.parameters()
        for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
    }


SIGMOIDS = {"scoring_func": "sigmoid", "group_score": "top2_sum", "e_score_correction_bias": True}
GROUPS = {"n_group": 3, "topk_group": 2, "n_shared_experts": 2}
ROUTINGS = ["random", "idle experts", "ties"]
FAMILIES = [
    ("mixtral", model_of()),
    ("mixtral", model_of(experts=4, top_k=1, hidden_act="gelu_pytorch_tanh")),
    ("qwen3_moe", model_of(experts=7, top_k=3, size=27)),
    ("qwen3_moe", model_of(experts=7, top_k=3, size=27, norm_topk_prob=False)),
    ("deepseek_v3", model_of(experts=6, top_k=3, size=27, **GROUPS, **SIGMOIDS)),
    ("deepseek_v3", model_of(n_shared_experts=1, norm_topk_prob=False, **SIGMOIDS)),
    ("deepseek_v2", model_of(experts=6, top_k=2, norm_topk_prob=False, routed_scaling_factor=1.7, **GROUPS)),
]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("family", "model"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_block_and_every_gradient_are_transformers(family: str, model: ModelConfig, routing: str) -> None:
    """Catches another routing, a lost token, an expert's answer given to another token, or weighed before the cut."""
    ours, theirs = sparse_mlp(model), theirs_of(model, family)
    degenerate(ours, routing)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.gate.weight)  # type: ignore[union-attr,operator]
        theirs.experts.gate_up_proj.copy_(ours.experts.up_projections.weight)  # type: ignore[union-attr,operator]
        theirs.experts.down_proj.copy_(ours.experts.down_proj.weight)  # type: ignore[union-attr,operator]
        if model.n_shared_experts:
            gate_up, shared = ours.shared_experts.up_projections.weight.chunk(2), theirs.shared_experts  # type: ignore[union-attr,operator]
            shared.gate_proj.weight.copy_(gate_up[0]), shared.up_proj.weight.copy_(gate_up[1])  # type: ignore[union-attr,operator]
            shared.down_proj.weight.copy_(ours.shared_experts.down_proj.weight)  # type: ignore[union-attr,operator]
        if model.e_score_correction_bias:
            bias = theirs.gate.e_score_correction_bias.uniform_(-0.3, 0.3)  # type: ignore[union-attr,operator]
            ours.balance.bias = bias.clone()  # type: ignore[union-attr]
    x, direction = hidden_states()
    their_x = x.detach().clone().requires_grad_()
    found, expected = ours(x), theirs(their_x)
    found.backward(direction), expected.backward(direction)

    gradients, their_experts = gradients_of(ours), theirs.experts
    pairs = [("output", found, expected), ("hidden", x.grad, their_x.grad)]
    pairs.append(("router", gradients.pop("mlp.gate.weight"), theirs.gate.weight.grad))  # type: ignore[union-attr]
    for index in range(model.num_experts or 0):
        gate, up = their_experts.gate_up_proj.grad[index].chunk(2)  # type: ignore[union-attr,index]
        down = their_experts.down_proj.grad[index]  # type: ignore[union-attr,index]
        for name, gradient in (("gate", gate), ("up", up), ("down", down)):
            pairs.append((name, gradients.pop(f"mlp.experts.{index}.{name}_proj.weight"), gradient))
    for name in [name for name in gradients if "shared" in name]:
        linear_layer = theirs.get_submodule(name.removeprefix("mlp.").removesuffix(".weight"))
        pairs.append((name, gradients.pop(name), linear_layer.weight.grad))  # type: ignore[arg-type]
    assert not gradients
    for name, mine, want in pairs:
        # the same fp32 terms; sums over experts and tokens in another order
        torch.testing.assert_close(mine, want, rtol=0, atol=2e-6 * float(want.detach().abs().max()) + 1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_logits_of_narrow_numbers_give_transformers_choices(dtype: torch.dtype) -> None:
    """Catches logits that are rounded before the choice, which moves one token in thirty, and gradients of them.

    Weights of fp32 sums in another order are equal within 1e-5; gradients are rounded once on both sides.
    """
    model = model_of(experts=96, top_k=5, n_group=4, topk_group=2, fp32_router=True, **SIGMOIDS)
    ours, theirs = sparse_mlp(model).gate.to(dtype), theirs_of(model, "deepseek_v3").gate.to(dtype)  # type: ignore[union-attr,operator]
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)  # type: ignore[union-attr,operator]
    theirs.e_score_correction_bias = bias = torch.linspace(-0.02, 0.03, 96)[torch.randperm(96)]
    x = torch.randn(1, 2000, HIDDEN, dtype=dtype, requires_grad=True)
    their_x = x.detach().clone().requires_grad_()
    found, (_, weights, chosen) = ours(x, bias), theirs(their_x)
    dense = torch.zeros(2, 2000, 96).scatter(
        2, torch.stack((found.experts[0], chosen)), torch.stack((found.weights[0], weights))
    )
    torch.testing.assert_close(dense[0], dense[1], rtol=1e-5, atol=1e-7)
    direction = torch.randn(2000, 96)
    (found.weights[0] * direction.gather(1, found.experts[0])).sum().backward()
    (weights * direction.gather(1, chosen)).sum().backward()
    for mine, want in ((x.grad, their_x.grad), (ours.weight.grad, theirs.weight.grad)):
        torch.testing.assert_close(mine, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4 * float(want.abs().max()))  # type: ignore[union-attr]


def test_experts_that_nobody_chose_have_gradients_of_zero() -> None:
    """Not None: DeepSpeed would wait for them for ever, or leave what the last step put into its buffer."""
    block = sparse_mlp(model_of())
    degenerate(block, "idle experts")
    x, direction = hidden_states()
    block(x).backward(direction)
    gradients = gradients_of(block)
    used = {name for name, gradient in gradients.items() if gradient.any()}
    idle = {f"mlp.experts.{index}.{part}_proj.weight" for index in (1, 4) for part in ("gate", "up", "down")}
    assert used == gradients.keys() - idle


def test_names_on_disk_are_qwen3_moes() -> None:
    shapes = {
        piece.name: piece.shape for p in sparse_mlp(model_of(experts=2)).parameters() for piece in p.shard.pieces()
    }  # type: ignore[attr-defined]
    wide, narrow = (29, HIDDEN), (HIDDEN, 29)
    of_expert = {"gate_proj.weight": wide, "up_proj.weight": wide, "down_proj.weight": narrow}
    expected = {f"mlp.experts.{index}.{name}": shape for index in range(2) for name, shape in of_expert.items()}
    assert shapes == {"mlp.gate.weight": (2, HIDDEN), **expected}


@pytest.mark.parametrize("emulated", [False, True], ids=["bf16 units", "without"])
def test_bf16_rounds_no_worse_than_transformers(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_cpu_multiplies_bf16", lambda: not emulated)
    model = model_of(experts=3, top_k=3)  # all of them: a rounded choice would be another function
    ours, theirs = sparse_mlp(model).bfloat16(), theirs_of(model, "mixtral").bfloat16()
    exact = sparse_mlp(model).double()
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), ours.parameters(), strict=True):
            wide.copy_(narrow)
        theirs.gate.weight.copy_(ours.gate.weight)  # type: ignore[union-attr,operator]
        theirs.experts.gate_up_proj.copy_(ours.experts.up_projections.weight)  # type: ignore[union-attr,operator]
        theirs.experts.down_proj.copy_(ours.experts.down_proj.weight)  # type: ignore[union-attr,operator]
    x, direction = hidden_states(torch.bfloat16)
    wide_x, their_x = x.detach().double().requires_grad_(), x.detach().clone().requires_grad_()
    want, found, their = exact(wide_x), ours(x), theirs(their_x)
    want.backward(direction.double()), found.backward(direction), their.backward(direction)
    for mine, theirs_, right in ((found, their, want), (x.grad, their_x.grad, wide_x.grad)):
        # the same roundings, of other sums: twice transformers' distance is generous, a lost term is not
        assert (mine.double() - right).norm() <= 2 * (theirs_.double() - right).norm()


def _dealt(rank: int, tp_size: int, ep: int, cases: list[tuple[ModelConfig, str, bool]]) -> list[dict[str, Any]]:
    """Each replica has an input of its own; what the ranks of a case return, `replica` among it."""
    replica, tensor_rank = divmod(rank, tp_size)
    replicas = [[each * tp_size + other for other in range(tp_size)] for each in range(ep)]
    tensor_groups = [dist.new_group(ranks) for ranks in replicas]
    expert_groups = [dist.new_group([ranks[other] for ranks in replicas]) for other in range(tp_size)]
    seen = []
    for model, routing, sequence_parallel in cases:
        experts = RankGroup(ep, replica, expert_groups[tensor_rank])
        tp = TensorParallel(tp_size, tensor_rank, tensor_groups[replica], sequence_parallel, experts=experts)
        seen.append(_passed(model, routing, tp, replica))
    return seen


def _on_rank(rank: int, tp_size: int, cases: list[tuple[ModelConfig, str, bool]]) -> list[dict[str, Any]]:
    seen = []
    for model, routing, sequence_parallel in cases:
        tp = TensorParallel(tp_size, rank, dist.group.WORLD if tp_size > 1 else None, sequence_parallel)
        seen.append(_passed(model, routing, tp))
    return seen


def _passed(model: ModelConfig, routing: str, tp: TensorParallel, replica: int = 0) -> dict[str, Any]:
    """Output and gradients of one forward and backward on this rank."""
    block = sparse_mlp(model, tp)
    degenerate(block, routing)
    block.double()
    x, direction = (each.detach().roll(replica, dims=-1) for each in hidden_states(torch.float64))
    x[..., 0] = 1.0
    if tp.sequence_is_cut:
        x, direction = (each.chunk(tp.size, dim=1)[tp.rank].clone() for each in (x, direction))
    out = block(x.requires_grad_())
    out.backward(direction)
    gradients = [
        (piece.name, piece.shape, piece.source, parameter.grad[piece.target])  # type: ignore[index]
        for parameter in block.parameters()
        for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
    ]
    return {"replica": replica, "output": out.detach(), "hidden": x.grad, "gradients": gradients}


NEAR = 1e-12  # float64, sums in another order


@pytest.mark.parametrize("tp_size", [2, 4])
def test_cut_experts_are_the_whole_ones(tp_size: int) -> None:
    """Catches a router gradient of this rank's features only, with and without a cut sequence, and padding."""
    models = [model_of(), model_of(experts=7, top_k=3, size=27, norm_topk_prob=False)]
    models.append(model_of(experts=6, routed_scaling_factor=1.3, **GROUPS, **SIGMOIDS))
    cases = [(m, routing, sp) for m in models for routing in ROUTINGS for sp in (False, True)]
    ranks = run_ranks(_on_rank, tp_size, tp_size, cases)
    for case, serial, *seen in zip(cases, _on_rank(0, 1, cases), *ranks, strict=True):
        for key in ("output", "hidden"):
            parts = [torch.cat([rank[key] for rank in seen], dim=1)] if case[2] else [rank[key] for rank in seen]
            for part in parts:
                torch.testing.assert_close(part, serial[key], atol=NEAR, rtol=0, msg=f"{key} of {case[1:]}")
        expected = {name: gradient for name, _, _, gradient in serial["gradients"]}
        numbers = dict.fromkeys(expected, 0)
        for name, shape, source, gradient in (piece for rank in seen for piece in rank["gradients"]):
            assert shape == expected[name].shape
            torch.testing.assert_close(gradient, expected[name][source], atol=NEAR, rtol=0, msg=f"{name} {case[1:]}")
            numbers[name] += gradient.numel()
        replicas = {name: tp_size if name == "mlp.gate.weight" else 1 for name in expected}
        assert numbers == {name: replicas[name] * gradient.numel() for name, gradient in expected.items()}


@pytest.mark.parametrize(("ep", "tp_size"), [(2, 1), (2, 2), (4, 1)])
def test_experts_dealt_over_replicas_are_those_of_one_process(ep: int, tp_size: int) -> None:
    """Catches a row that comes back to another token, counts that are off, and ranks that wait for one without rows:
    all tokens of all replicas may choose one expert."""
    models = [(model_of(experts=8, top_k=3), ROUTINGS), (model_of(experts=4, top_k=1), [*ROUTINGS, "one expert"])]
    models.append((model_of(experts=4, n_shared_experts=1, norm_topk_prob=False), ROUTINGS))
    cases = [(m, routing, sp) for m, routings in models for routing in routings for sp in {False, tp_size > 1}]
    ranks = run_ranks(_dealt, ep * tp_size, tp_size, ep, cases)
    for (model, routing, sp), *seen in zip(cases, *ranks, strict=True):
        serial, total = [_passed(model, routing, SERIAL, replica) for replica in range(ep)], dict[str, Tensor]()
        for one in serial:
            for name, _, _, gradient in one["gradients"]:
                total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
        for replica, one in enumerate(serial):
            of_replica = [rank for rank in seen if rank["replica"] == replica]
            for key in ("output", "hidden"):
                parts = [rank[key] for rank in of_replica]
                for part in [torch.cat(parts, dim=1)] if sp else parts:
                    torch.testing.assert_close(part, one[key], atol=NEAR, rtol=0, msg=f"{key} {routing} {sp}")
            own = {name: gradient for name, _, _, gradient in one["gradients"]}
            numbers = dict.fromkeys(total, 0)
            for name, _, source, gradient in (piece for rank in of_replica for piece in rank["gradients"]):
                want = (total if _is_dealt(name) else own)[name][source]
                torch.testing.assert_close(gradient, want, atol=NEAR, rtol=0, msg=f"{name} {routing} {sp}")
                numbers[name] += gradient.numel()
            held = {name for name, count in numbers.items() if count and _is_dealt(name)}
            assert len(held) == 3 * model.num_experts // ep
            assert all(numbers[name] == total[name].numel() for name in held)


def _noted(rank: int) -> list[str]:
    """What happens in a forward and a backward, in order."""
    block = sparse_mlp(
        model_of(experts=4, n_shared_experts=1), TensorParallel(experts=RankGroup(2, rank, dist.group.WORLD))
    )
    events, exchanged = list[str](), RowMessages._exchanged

    def noted(self: RowMessages, *arguments: Any) -> Begun:
        begun = exchanged(self, *arguments)
        events.append("begin")

        def wait() -> None:
            events.append("wait")
            begun.wait()

        return Begun(begun.tensor, SimpleNamespace(wait=wait))  # type: ignore[arg-type]

    shared = block.shared_experts
    assert isinstance(shared, nn.Module)
    shared.register_forward_hook(lambda *_: events.append("shared"))
    next(shared.parameters()).register_hook(lambda _: events.append("shared"))
    with patch.object(RowMessages, "_exchanged", noted):
        x, direction = hidden_states()
        block(x).backward(direction)
    return events


def test_shared_experts_are_computed_while_tokens_are_under_way() -> None:
    forward, backward = ["begin", "shared", "wait", "begin", "wait"], ["begin", "wait", "begin", "shared", "wait"]
    assert run_ranks(_noted, 2) == [forward + backward] * 2


def _is_dealt(name: str) -> bool:
    return name.startswith("mlp.experts.")


def test_stages_balance_by_what_a_token_costs() -> None:
    """Two of eight experts are on a token's way; blocks with and without experts differ."""
    model = model_of(experts=8, size=30, mlp_only_layers=(0,))
    attention = 4 * HIDDEN * HIDDEN
    dense, sparse = (spec.cost for spec in decoder_layers(model) if spec.is_block)
    assert dense == attention + 3 * HIDDEN * 50
    assert sparse == attention + 8 * HIDDEN + 2 * 3 * HIDDEN * 30


MOE = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 29, "mlp_only_layers": [1]}
DEEPSEEK = MOE | SIGMOIDS | {"n_shared_experts": 2, "routed_scaling_factor": 1.5}
LOSSES = {"sequence_loss": 0.3, "z_loss": 0.2}  # large: their gradients are a fifth of the whole
# a micro-batch of one sequence is 10 rows for 12 experts: on every rank some are idle
BASE = Case(model=MOE, micro_batch=1, sequence=5, steps=2, optimizer="sgd", learning_rate=0.1, router=LOSSES)
TRAININGS = [
    replace(BASE, dp=2),
    replace(BASE, dp=2, zero=2),
    replace(BASE, dp=2, zero=3, recompute="full"),
    replace(BASE, dp=2, ep=2, zero=2, recompute="full"),
    replace(BASE, pp=2, accumulation=2),
    replace(BASE, pp=2, accumulation=2, schedule="zero-bubble"),
    replace(BASE, tp=2, micro_batch=2),
    replace(BASE, tp=2, micro_batch=2, sequence=6, sequence_parallel=True),
    replace(BASE, tp=2, micro_batch=2, sequence=6, sequence_parallel=True, model=DEEPSEEK),
    replace(BASE, pp=2, accumulation=2, sequence=6, recompute="selective", model=DEEPSEEK),
]


def _trained(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Each case's weights after its steps, and how experts were used in them."""
    results = []
    for case in cases:
        engine = engine_of(case)
        usage = ExpertUsage(engine, dist.group.WORLD)
        for batch in global_batches(case):
            result = engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
            assert result.taken
            usage.add(result)
        results.append({"weights": local_weights(engine), "usage": usage.gather()})
    return results


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """Scores with a sum of one."""
    return logits.softmax(-1) if scoring == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)


def balance_losses(logits: Tensor, top_k: int, scoring: str = "softmax") -> Tensor:
    """Both losses of one layer by their formulas, a sequence and an expert at a time; `[batch, seq, experts]`."""
    of_sequences = []
    for sequence in logits:
        scores = scores_of(sequence, scoring)
        chosen = scores.topk(top_k, dim=-1).indices
        length, experts = sequence.shape
        balance = sum(
            experts / (top_k * length) * (chosen == expert).sum() * scores[:, expert].mean()
            for expert in range(experts)
        )
        z = sequence.exp().sum(-1).log().square().mean()
        of_sequences.append(LOSSES["sequence_loss"] * balance + LOSSES["z_loss"] * z)
    return torch.stack(of_sequences).mean()


def test_a_bias_of_the_choice_leaves_the_balance_losses_as_they_are() -> None:
    """Of DeepSeek-V3 equation 18 counts the best scores, and equation 16 chooses with the bias."""
    block, (x, _) = sparse_mlp(model_of()).double(), hidden_states(torch.float64)
    gate, bias = block.gate.weight, torch.linspace(-0.3, 0.3, 5)
    gradients = []
    for losses in (RouterConfig(), RouterConfig.model_validate(LOSSES)):
        block.balance.bias, block.balance.losses, block.balance.scale = bias, losses, 1 / len(x)
        block.zero_grad()
        block(x).sum().backward()
        gradients.append(gate.grad.clone())
    logits = nn.functional.linear(x, gate)
    assert not logits.topk(2).indices.sort().values.equal((logits.softmax(-1) + bias).topk(2).indices.sort().values)
    (expected,) = torch.autograd.grad(balance_losses(logits, 2), gate)
    torch.testing.assert_close(gradients[1] - gradients[0], expected, atol=NEAR, rtol=0)


def solved(case: Case) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Weights and usage after the case's training in float64 on one process, without an engine."""
    config = case.config()
    make = partial(make_layer, seed=case.seed, initializer_range=config.model.initializer_range)
    model = SerialModel(decoder_layers(config.model), SERIAL, make).double()
    choices: dict[str, Tensor] = {}
    for name, part in model.named_modules():
        if isinstance(part, Router):
            block = name.split("/")[-1].split(".")[0]
            part.register_forward_hook(lambda _, inputs, out, block=block: choices.update({block: out.logits}))
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": config.optimizer.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1]},
        ],
        lr=case.learning_rate,
    )
    seen: dict[str, list[Tensor]] = {}
    for batch in global_batches(case):
        hidden, head = model(torch.from_numpy(batch.tokens))
        logits = nn.functional.linear(hidden, head).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(batch.targets).flatten())
        for block, of_router in choices.items():
            loss = loss + balance_losses(of_router, 2, config.model.scoring_func)
            seen.setdefault(block, []).append(of_router.detach().flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
    usage = {}
    for block, of_steps in seen.items():
        scores = scores_of(torch.cat(of_steps), config.model.scoring_func)
        counts = scores.topk(2, dim=-1).indices.flatten().bincount(minlength=scores.shape[-1])
        entropy = -(scores * scores.log()).sum(-1).mean()
        dead, ratio = int((counts == 0).sum()), float(counts.max() / counts.double().mean())
        usage[f"layer_{block}"] = {"max_over_mean": ratio, "dead": dead, "entropy": float(entropy)}
    pieces = [(piece, p) for _, p in named_shards(model) for piece in p.shard.pieces()]  # type: ignore[attr-defined]
    return {piece.name: p.detach()[piece.target] for piece, p in pieces}, usage


@pytest.mark.slow
def test_training_is_that_of_the_formulas_in_float64_on_every_layout() -> None:
    """ZeRO and the pipeline wait for a gradient of every parameter, also of idle experts. SGD, because AdamW would hide
    a wrong scale, of balance losses too: those are counted per micro-batch, replica or tensor-parallel rank."""
    kinds = {(case.sequence, str(case.model)): case.model for case in TRAININGS}
    expected = {kind: solved(replace(BASE, micro_batch=2, sequence=kind[0], model=kinds[kind])) for kind in kinds}
    for case, *ranks in zip(TRAININGS, *run_ranks(_trained, 2, TRAININGS), strict=True):
        found, (want, usage) = assemble(ranks), expected[case.sequence, str(case.model)]
        assert found.keys() == want.keys()
        for name, weight in want.items():
            # fp32 gradients of weights about 0.1, summed in another order, over two steps
            np.testing.assert_allclose(found[name], weight, atol=2e-6, rtol=0, err_msg=f"{case}: {name}")
        for of_rank in ranks:
            assert of_rank["usage"] == {block: pytest.approx(numbers, abs=1e-4) for block, numbers in usage.items()}
