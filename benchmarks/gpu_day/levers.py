"""The parts `levers-...`: one model's step with eager kernels, then with each option that is to make it faster.

A lever is a name for options of a config. Each is one item and one process, so that a part goes on where it stopped. An
option that this GPU, these versions or this model refuse is a result as well: the sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_day import shapes

if TYPE_CHECKING:
    from benchmarks.gpu_day.context import Context

Options = Mapping[str, Any]
MICRO_BATCHES = 4  # of a step: few enough for a trace that can be read, and the update is a small part

EAGER = ("performance.compile=none", "performance.attention=sdpa")
LEVERS: dict[str, tuple[str, ...]] = {
    "eager": EAGER,
    "compiled blocks": ("performance.compile=blocks", "performance.attention=sdpa"),
    "attention kernels": ("performance.compile=none", "performance.attention=auto"),
    "selective recomputation": (*EAGER, "recompute.mode=selective"),
    "Muon": (*EAGER, "optimizer.name=muon"),
    "defaults": (),  # compiled blocks and attention kernels
    "float8": ("precision.float8=rowwise",),  # over the defaults
}
OF_ALL = ("eager", "compiled blocks", "selective recomputation", "float8")
OF_MASKS = (*OF_ALL, "attention kernels", "defaults")  # documents, windows and capped scores have other kernels
OF_TINY = ("eager", "selective recomputation")


@dataclass(frozen=True)
class LeverRow:
    """A model, how much of it is computed at once, and what is tried on it."""

    model: Options  # the section `model`
    sequence: int
    micro_batch: int = 1
    document_length: int = 0  # mean tokens of a packed document; 0: each sequence is one
    levers: tuple[str, ...] = OF_ALL

    def tiny(self) -> LeverRow:
        """The same kind of model, small enough for a CPU."""
        sizes = shapes.tiny(shapes.LLAMA_1B).model()
        if "num_experts" in self.model:
            sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        if "layer_types" in self.model:
            sizes |= {"sliding_window": 32, "layer_types": self.model["layer_types"][: sizes["num_hidden_layers"]]}
        document_length = 16 if self.document_length else 0
        return LeverRow({**self.model, **sizes}, 64, 2, document_length, OF_TINY)

    def config(self, run_dir: Path) -> dict[str, Any]:
        """Returns the config that a lever's options change; its data is never read."""
        training = {
            "global_batch_size": MICRO_BATCHES * self.micro_batch,
            "micro_batch_size": self.micro_batch,
            "sequence_length": self.sequence,
            "steps": 100,
        }
        data = {"path": "unused", "document_mask": bool(self.document_length)}
        return {"run_dir": str(run_dir), "model": dict(self.model), "data": data, "training": training}


GEMMA_2_2B: Options = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "normalization": "zero_centered_rmsnorm",
    "norm_placement": "pre_and_post",
    "scale_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 13,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B_4_LAYERS: Options = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "query_key_norm": "per_head",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
ROWS: dict[str, LeverRow] = {  # by the name of their part
    "levers-1b": LeverRow(shapes.LLAMA_1B.model(), 4096, 4, levers=(*OF_ALL, "Muon")),
    "levers-1b-documents": LeverRow(shapes.LLAMA_1B.model(), 8192, 2, document_length=1024, levers=OF_MASKS),
    "levers-3b": LeverRow(shapes.LLAMA_3B.model(), 8192),
    "levers-8b-8-layers": LeverRow(shapes.LLAMA_8B_8_LAYERS.model(), 8192),
    "levers-gemma-2-2b": LeverRow(GEMMA_2_2B, 8192, levers=OF_MASKS),  # twice the window
    "levers-qwen3-moe-4-layers": LeverRow(QWEN3_30B_A3B_4_LAYERS, 4096, 2),
}


def run(context: Context) -> None:
    """Measures the levers of the row that the part is named after."""
    row = ROWS[context.part].tiny() if context.tiny else ROWS[context.part]
    for lever in row.levers:
        context.item(lever, lambda lever=lever: measured(context, row, lever))  # type: ignore[misc]


def measured(context: Context, row: LeverRow, lever: str) -> dict[str, Any]:
    """Returns the figures of one lever, from a process of its own."""
    folder = context.fresh_folder(f"{context.part}_{lever}")
    config = context.write_config(f"{folder.name}_config", row.config(folder))
    row_options = [str(row.document_length), *context.overrides, *LEVERS[lever]]
    found = context.json_of("-m", "benchmarks.gpu_day.lever_step", config, context.device, *row_options)
    return {"options": row_options[1:], **found}
