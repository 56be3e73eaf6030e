"""Budgets of the training step, as counts that need no GPU and do not flake.

Tests ask for equality: a change that does better lowers its number here in the same commit, and **a budget is raised
only by a commit that says why**. `goal` is what the work on a fast step wants to reach: no test asks for it.

Sizes are those of a Llama 8B block (hidden 4096, feed-forward 14336, 32 heads, 8 for keys and values), bf16, one
sequence of 8,192 tokens. Kernels of attention and plain RMSNorm count as one each, as on CUDA; a CPU has its own ways.
So do fused passes and their gradients, which a GPU has where blocks are not compiled.
What blocks share in a micro-batch is made before: flash attention's own kernel zeroes two numbers in backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.helpers.counting import BlockCase
from tests.helpers.engine_cases import Case

GPT = {
    "vocab_size": 50_304,
    "intermediate_size": 16_384,
    "num_key_value_heads": 32,
    "gated_mlp": False,
    "hidden_act": "gelu",
    "normalization": "layernorm",
}
GEMMA_2 = {
    "attn_logit_softcapping": 50.0,
    "normalization": "zero_centered_rmsnorm",
    "norm_placement": "pre_and_post",
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}


QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@dataclass(frozen=True)
class BlockBudget:
    """Counts of one decoder block, forward and backward."""

    case: BlockCase
    forward: int  # kernels
    backward: int
    kept: float  # bytes for backward per token, in units of hidden_size
    squares: int = 0  # kernels that read or write a tensor that is square in the sequence
    collectives: dict[str, int] = field(default_factory=dict)
    goal: str = ""


BLOCKS = {
    "llama, nothing compiled": BlockBudget(BlockCase(fuses=False), 16, 29, kept=34.03),
    "llama": BlockBudget(BlockCase(), 10, 16, kept=34.03),
    "documents": BlockBudget(BlockCase(documents=True), 10, 17, kept=34.03),
    "window": BlockBudget(BlockCase({"sliding_window": 4096}), 10, 17, kept=34.03),
    "selective": BlockBudget(BlockCase(recompute="selective"), 13, 21, 23.03),
    "full": BlockBudget(BlockCase(recompute="full"), 10, 24, 2.00),
    "norms of heads": BlockBudget(BlockCase({"query_key_norm": "per_head"}), 12, 21, 36.57),
    "gpt": BlockBudget(BlockCase(GPT, seq=2048), 10, 15, 32.04),
    "gemma 2": BlockBudget(BlockCase(GEMMA_2), 12, 17, kept=38.03),
    "experts": BlockBudget(BlockCase(QWEN3_MOE), 25, 30, kept=54.22),
    "tp 8": BlockBudget(BlockCase(tp=8), 11, 18, 11.26, collectives={"all_reduce": 4}),
    "tp 8, sequence parallel": BlockBudget(
        BlockCase(tp=8, sequence_parallel=True), 10, 16, 4.25, collectives={"all_gather": 6, "reduce_scatter": 4}
    ),
    "tp 8, sequence parallel, selective": BlockBudget(
        BlockCase(tp=8, sequence_parallel=True, recompute="selective"),
        13,
        21,
        2.88,
        collectives={"all_gather": 6, "reduce_scatter": 4},
    ),
}

# blocks that torch.compile gets into one graph, forward and backward; test_compiled_blocks.py has more
ONE_GRAPH = ("llama", "documents", "full", "tp 8, sequence parallel")

MUON_PRODUCTS = 15  # for each shape of matrix, however many there are, while they fit one batch

KERNELS_OF_EXPERTS = 25, 36  # of a layer where nothing is fused, however many experts there are
KERNELS_OF_BALANCE_LOSSES = 36  # of both, forward and backward

KERNELS_OF_SOURCE_LOSSES = 2, 6  # of a micro-batch, and of a step beside them


@dataclass(frozen=True)
class StepBudget:
    """Counts of one engine step of a rank under its guard, after a first one."""

    case: Case
    syncs: int
    collectives: dict[str, int]
    guards: dict[str, str] = field(default_factory=dict)  # the section
    goal: str = ""


STEPS = {
    "one process": StepBudget(Case(dtype="bf16", accumulation=4), 0, {}),
    "one process, sgd in fp32": StepBudget(Case(optimizer="sgd", accumulation=2), 0, {}),
    "dp 2": StepBudget(
        Case(dp=2, dtype="bf16", accumulation=4, bucket=20_000),
        0,
        {"all_reduce": 2, "reduce_scatter": 9, "all_gather": 9},
    ),
    "dp 2, fp16": StepBudget(
        Case(dp=2, dtype="fp16", accumulation=4, bucket=20_000),
        0,
        {"all_reduce": 2, "reduce_scatter": 9, "all_gather": 9},
    ),
    # the losses of sources travel with that of the step
    "dp 2, sources": StepBudget(
        Case(dp=2, dtype="bf16", accumulation=4, bucket=20_000, sources=5),
        0,
        {"all_reduce": 2, "reduce_scatter": 9, "all_gather": 9},
    ),
    "dp 2, guard of losses": StepBudget(
        Case(dp=2, dtype="bf16"), 1, {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 2}, {"loss_spike": "skip"}
    ),
    "dp 2, ZeRO-2": StepBudget(
        Case(dp=2, dtype="bf16", accumulation=4, zero=2), 0, {"all_reduce": 2, "reduce_scatter": 8, "all_gather": 2}
    ),
    # one gather of updates for each bucket of matrices
    "dp 2, muon": StepBudget(
        Case(dp=2, dtype="bf16", accumulation=4, bucket=20_000, optimizer="muon"),
        0,
        {"all_reduce": 2, "reduce_scatter": 9, "all_gather": 9 + 7},
    ),
    "dp 2, ZeRO-3": StepBudget(
        Case(dp=2, dtype="bf16", accumulation=4, zero=3), 0, {"all_reduce": 2, "reduce_scatter": 8, "all_gather": 5}
    ),
    "tp 2, sequence parallel": StepBudget(
        Case(tp=2, sequence_parallel=True, sequence=34, dtype="bf16", accumulation=2),
        0,
        {"all_reduce": 2, "reduce_scatter": 44, "all_gather": 66},
    ),
    "pp 2": StepBudget(
        Case(pp=2, dtype="bf16", accumulation=4), 0, {"send": 4, "recv": 4, "all_reduce": 1, "broadcast": 1}
    ),
    "pp 2, sources": StepBudget(
        Case(pp=2, dtype="bf16", accumulation=4, sources=5), 0, {"send": 4, "recv": 4, "all_reduce": 1, "broadcast": 1}
    ),
}
