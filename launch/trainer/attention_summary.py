"""The computation of attention in a run, in words: which kernel, and why no better one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from megalite.config import Config
from megalite.units import plural

if TYPE_CHECKING:
    import torch


def format_attention(config: Config, device: torch.device) -> str:
    """Returns the kernel of the layers of each kind in training on `device`, as one line."""
    import torch

    from megalite.engine.stages import TORCH_DTYPES
    from megalite.parallel.collectives import TensorParallel
    from models.attention import Attention

    model, seq, dtype = config.model, config.training.sequence_length, TORCH_DTYPES[config.precision.dtype]
    kinds = Counter[str]()
    for layer in range(model.num_hidden_layers):
        with torch.device("meta"):  # no tensor-parallel rank chooses otherwise
            attention = Attention(model, layer, TensorParallel(), "none", config.performance.attention)
        window = attention.window if attention.window is not None and attention.window < seq else None
        is_masked = window is not None or config.data.document_mask
        kernel, reason = attention.kernel(device, dtype, is_masked=is_masked)
        fused = attention.fused_kernel(device, dtype, min(seq, 128), is_masked=is_masked) if kernel == "fused" else ""
        words = {
            "varlen": f"flash attention by {'boundaries of documents' if config.data.document_mask else 'windows'}",
            "flex": "FlexAttention, which caps scores in its kernel",
            "explicit": "all scores in memory",
            "fused": f"torch's {fused} attention{' with a mask over all scores' if is_masked else ''}",
        }[kernel]
        seen = "" if window is None else f" with a window of {window} tokens"
        kinds[f"{seen}: {words}{'' if reason is None else f', because {reason}'}"] += 1
    return "attention of " + "; ".join(plural(count, "layer") + words for words, count in kinds.items())
