"""The line about attention kernels says for every kind of layer which one, and why no better one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from launch.trainer.attention_summary import format_attention
from megalite.config import load_config
from tests.helpers.commands import ROOT

GEMMA = {"model.attn_logit_softcapping": 3.0}
WINDOWS = {
    "model.sliding_window": 16,
    "model.num_hidden_layers": 3,
    "model.layer_types": "[sliding_attention,full_attention,sliding_attention]",
}
HOPPER = {"GPU": "H100"}  # on which torch tries cuDNN first
DOCUMENTS = {"data.document_mask": True}
FLASH = "flash attention by boundaries of documents"
WITH_A_MASK = "torch's memory-efficient attention with a mask over all scores, because"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "attention of 3 layers: torch's flash attention"),
        (HOPPER, "attention of 3 layers: torch's cuDNN attention"),
        (HOPPER | {"model.head_dim": 20}, "attention of 3 layers: torch's flash attention"),
        ({"precision.dtype": "fp32"}, "attention of 3 layers: torch's memory-efficient attention"),
        (DOCUMENTS, f"attention of 3 layers: {FLASH}"),
        (
            WINDOWS,
            "attention of 2 layers with a window of 16 tokens: flash attention by windows; 1 layer: torch's flash "
            "attention",
        ),
        (WINDOWS | DOCUMENTS, f"2 layers with a window of 16 tokens: {FLASH}; 1 layer: {FLASH}"),
        (DOCUMENTS | {"performance.attention": "sdpa"}, f"3 layers: {WITH_A_MASK} performance.attention is sdpa"),
        (HOPPER | DOCUMENTS | {"performance.attention": "sdpa"}, f"3 layers: {WITH_A_MASK} performance.attention is"),
        (DOCUMENTS | {"precision.dtype": "fp32"}, f"3 layers: {WITH_A_MASK} flash attention takes bf16 and fp16, not"),
        (GEMMA, "3 layers: FlexAttention, which caps scores in its kernel"),
        (GEMMA | {"performance.attention": "sdpa"}, "all scores in memory, because performance.attention is sdpa"),
        (GEMMA | {"model.head_dim": 24}, "all scores in memory, because FlexAttention takes heads of 16, 32, 64"),
        ({"model.attention_dropout": 0.1}, "all scores in memory, because probabilities are dropped"),
    ],
    ids=str,
)
def test_each_kind_of_layer_has_its_kernel_and_reason(
    options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the GPU are fake."""
    monkeypatch.setattr(torch, "_fused_sdp_choice", partial(choice, "GPU" in options))
    basic = {"precision.dtype": "bf16", "model.num_hidden_layers": 3, "model.head_dim": 16}
    words = [f"{name}={value}" for name, value in (basic | options).items() if name != "GPU"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", words)
    with FakeTensorMode():
        assert expected in format_attention(config, torch.device("cuda"))


def choice(
    is_hopper: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: float, causal: bool, enable_gqa: bool
) -> int:
    """As sdp_utils.cpp of torch 2.13 has it for the sizes here."""
    assert q.is_cuda and q.requires_grad and causal == (mask is None) and enable_gqa == (q.shape[1] != k.shape[1])
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if is_hopper and torch.backends.cuda.cudnn_sdp_enabled() and is_half and q.shape[-1] % 8 == 0:
        return SDPBackend.CUDNN_ATTENTION.value
    if is_half and mask is None:
        return SDPBackend.FLASH_ATTENTION.value
    return (SDPBackend.MATH if enable_gqa else SDPBackend.EFFICIENT_ATTENTION).value
