"""Models that the GPU day trains, their configs, and the arithmetic of parameters, floating-point operations and MFU.

Pure data and numbers: the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 10  # of a timed run: kernels are chosen and memory is cached in the first ones


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes, and how much of it is computed at once."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    sequence: int = 4096
    micro_batch: int = 1
    global_batch: int = 16
    steps: int = 30
    warm_up_steps: int = WARM_UP_STEPS
    dtype: str = "bf16"

    @property
    def block_parameters(self) -> int:
        """Parameters of one layer: four projections of attention, three of the feed-forward, two norms."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate + 2)

    @property
    def parameters(self) -> int:
        """All of them, a tied embedding once."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.layers * self.block_parameters + self.hidden + embeddings

    @property
    def multiplied_parameters(self) -> int:
        """Those in matrix products: an input embedding of its own is only looked up."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def flops_per_token(self) -> float:
        """Forward and backward: 6 for each multiplied parameter, and 12 x layers x width x sequence for attention.

        Attention counts whole, as in the PaLM paper, though a causal mask needs half; recomputation does not count.
        """
        attention = 12 * self.layers * self.heads * self.head_dim * self.sequence
        return float(6 * self.multiplied_parameters + attention)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    def with_options(self, config: Mapping[str, Any]) -> Shape:
        """As a config has it that was made of this shape and then changed."""
        model, training = config["model"], config["training"]
        return replace(
            self,
            hidden=model["hidden_size"],
            intermediate=model["intermediate_size"],
            layers=model["num_hidden_layers"],
            heads=model["num_attention_heads"],
            kv_heads=model["num_key_value_heads"],
            head_dim=model["head_dim"],
            vocabulary=model["vocab_size"],
            tied=model["tie_word_embeddings"],
            sequence=training["sequence_length"],
            micro_batch=training["micro_batch_size"],
            global_batch=training["global_batch_size"],
        )

    def model(self) -> dict[str, Any]:
        """The section `model` of a config."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.tied,
            "rope_theta": 500000.0,
            "max_position_embeddings": max(8192, self.sequence),
        }

    def config(self, run_dir: Path, data: Path) -> dict[str, Any]:
        """A config of `megalite train` on one rank that measures and saves nothing."""
        return {
            "run_dir": str(run_dir),
            "model": self.model(),
            "data": {"path": str(data)},
            "precision": {"dtype": self.dtype},
            "training": {
                "global_batch_size": self.global_batch,
                "micro_batch_size": self.micro_batch,
                "sequence_length": self.sequence,
                "steps": self.steps,
            },
            "checkpoint": {"interval": 0, "save_last": False, "background": False},
            "monitor": {"plot": False},  # so that matplotlib need not be there
        }


# micro-batches: the planner predicts 42, 67 and 59 GiB for them, so that a GPU of 80 GB has room for what it forgets
LLAMA_1B = Shape("1B", 2048, 8192, 16, 32, 8, 64, 128256, tied=True, micro_batch=4)
LLAMA_3B = Shape("3B", 3072, 8192, 28, 24, 8, 128, 128256, tied=True, micro_batch=1)
LLAMA_8B_8_LAYERS = Shape("8B, 8 layers", 4096, 14336, 8, 32, 8, 128, 128256, tied=False, micro_batch=2)


def tiny(shape: Shape) -> Shape:
    """The same kind of model, small enough for a CPU: everything runs, nothing is worth a measurement."""
    return replace(
        shape,
        hidden=64,
        intermediate=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=1024,
        sequence=64,
        micro_batch=2,
        global_batch=4,
        steps=8,
        warm_up_steps=3,
    )


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops: float) -> float:
    """Model FLOPs utilization: what the mathematics needs, over what the hardware could do."""
    return tokens_per_second * flops_per_token / peak_flops
