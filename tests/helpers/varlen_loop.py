"""torch's flash attention over documents as its documentation has it, a loop: the kernel itself needs a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attended(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scale: float | None) -> Tensor:
    """One document, `[tokens, heads, head_dim]`: token i sees tokens i - left to i + right; -1: without bound. The last
    query is the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
    left, right = (len(k) if bound < 0 else bound for bound in window)
    scores = scores.masked_fill((distance > left) | (distance < -right), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def varlen_by_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as documented; documents may be empty."""
    lengths, of_keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    for edges, found, tensor, most in ((cu_seq_q, lengths, query, max_q), (cu_seq_k, of_keys, key, max_k)):
        assert edges.dtype == torch.int32 and edges[0] == 0 and sum(found) == len(tensor) and max(found) <= most
    assert all(0 <= own <= keys for own, keys in zip(lengths, of_keys, strict=True))
    assert enable_gqa or query.shape[1] == key.shape[1]
    parts = zip(query.split(lengths), key.split(of_keys), value.split(of_keys), strict=True)
    return torch.cat([attended(q, k, v, options["window_size"], options["scale"]) for q, k, v in parts])
