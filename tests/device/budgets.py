"""What a warm step asks a device for, as counts that need no GPU and do not flake.

Tests ask for equality, as those of tests/performance/budgets.py do: a change that does better lowers its number here in
the same commit, and a number is raised only by a commit that says why. Kernels are those of torch's CUDA build: where
another version of torch has others, `other_launches` says how many. Rows that are added in place to the sum of an
embedding's gradients are sorted first: nine launches a micro-batch. torch's gradient of an embedding sorts too, beyond
3,072 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GEMMA_2 = {
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "normalization": "zero_centered_rmsnorm",
    "norm_placement": "pre_and_post",
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
DROPOUT = {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}


@dataclass(frozen=True)
class StepBudget:
    """Counts of one step: a Llama of three layers in bf16 and two micro-batches of two samples, but for `sections`."""

    launches: int  # of kernels, products of matrices included
    syncs: int = 0  # the host waits until a stream is idle
    event_syncs: int = 0  # it waits for an event, such as the end of the step before
    waits: int = 0  # of one stream for another
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the config, what differs
    capability: int = 80
    hazards: int = 1  # STAND_IN_HAZARDS
    other_launches: dict[str, int] = field(default_factory=dict)  # by torch's version, as "2.11"


SORTING = {"2.11": 2}  # launches more of a step's embedding, by torch's version
STEPS = {
    "bf16": StepBudget(482, event_syncs=2, waits=1),
    "fp32": StepBudget(489, event_syncs=2, waits=1, sections={"precision": {"dtype": "fp32"}}),
    "fp16": StepBudget(518, event_syncs=2, waits=1, sections={"precision": {"dtype": "fp16"}}),
    "documents": StepBudget(532, event_syncs=2, waits=1, sections={"data": {"document_mask": True}}),
    "documents in fp32": StepBudget(
        517, event_syncs=2, waits=1, sections={"data": {"document_mask": True}, "precision": {"dtype": "fp32"}}
    ),
    "recompute selective": StepBudget(506, event_syncs=2, waits=1, sections={"recompute": {"mode": "selective"}}),
    "recompute full": StepBudget(572, event_syncs=2, waits=1, sections={"recompute": {"mode": "full"}}),
    "ZeRO-2": StepBudget(486, event_syncs=2, waits=1, sections={"parallel": {"zero_stage": 2}}),
    "ZeRO-2 in fp16": StepBudget(
        518, event_syncs=2, waits=1, sections={"parallel": {"zero_stage": 2}, "precision": {"dtype": "fp16"}}
    ),
    "ZeRO-3": StepBudget(487, syncs=1, event_syncs=2, waits=161, sections={"parallel": {"zero_stage": 3}}),
    "ZeRO-3, fused passes": StepBudget(
        407, 1, 2, 167, {"parallel": {"zero_stage": 3}, "performance": {"compile": "auto"}}
    ),
    "dropout": StepBudget(1560, event_syncs=2, waits=1, sections={"model": DROPOUT}),
    "dropout, recompute full": StepBudget(
        2544, event_syncs=2, waits=1, sections={"model": DROPOUT, "recompute": {"mode": "full"}}
    ),
    "Muon": StepBudget(573, event_syncs=2, waits=1, sections={"optimizer": {"name": "muon"}}),
    "SGD": StepBudget(478, event_syncs=2, waits=1, sections={"optimizer": {"name": "sgd"}}),
    "moments in bf16": StepBudget(490, event_syncs=2, waits=1, sections={"optimizer": {"moments_dtype": "bf16"}}),
    # copies of what the last block keeps may still run when its memory is taken again: nothing is copied back of it
    "activations offloaded": StepBudget(
        482, event_syncs=2, waits=103, sections={"offload": {"activations": "cpu"}}, hazards=2
    ),
    "windows": StepBudget(500, event_syncs=2, waits=1, sections={"model": {"sliding_window": 16}}),
    "norms of heads": StepBudget(572, event_syncs=2, waits=1, sections={"model": {"query_key_norm": "per_head"}}),
    "layernorm": StepBudget(
        472,
        event_syncs=2,
        waits=1,
        sections={"model": {"normalization": "layernorm", "gated_mlp": False, "hidden_act": "gelu"}},
    ),
    "gemma 2, explicit": StepBudget(
        1283, event_syncs=2, waits=1, sections={"model": GEMMA_2, "performance": {"attention": "sdpa"}}
    ),
    "deterministic": StepBudget(
        526, event_syncs=2, waits=1, sections={"training": {"deterministic": True}}, other_launches={"2.11": 530}
    ),
    "compiled blocks": StepBudget(336, event_syncs=2, waits=1, sections={"performance": {"compile": "blocks"}}),
    "compiled blocks of an H100": StepBudget(
        336, event_syncs=2, waits=1, sections={"performance": {"compile": "blocks"}}, capability=90
    ),
}
