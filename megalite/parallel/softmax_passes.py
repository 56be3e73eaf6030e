"""The two passes over logits that make a loss and its gradient, to be fused: `megalite.parallel.loss`.

Logits `[chunk, rows]` are one rank's part of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _final_logits(logits: Tensor, real_rows: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Returns the logits in fp32, capped, those of padding as small as they can be; and the number of each column."""
    x, columns = logits.float(), torch.arange(logits.shape[1], device=logits.device)
    if softcap is not None:
        x = (x / softcap).tanh() * softcap
    if real_rows < logits.shape[1]:
        x = torch.where(columns < real_rows, x, torch.finfo(torch.float32).min)
    return x, columns


def reduce_rows(real_rows: int, softcap: float | None, logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp of each row, and its logit in `column` `[chunk, 1]`, or 0 if that is none of them.

    The first four operations are written as inductor wants them to compute maximum and sum in one pass on a GPU.
    """
    x, columns = _final_logits(logits, real_rows, softcap)
    top = x.amax(dim=-1, keepdim=True)
    total = (x - top).exp().sum(dim=-1, keepdim=True)
    picked = torch.where(columns == column, x, 0.0).sum(dim=-1)
    return (total.log() + top).squeeze(-1), picked


def differentiate_(
    real_rows: int, softcap: float | None, logits: Tensor, column: Tensor, log_total: Tensor, factor: Tensor
) -> None:
    """Writes `factor x (softmax - one_hot)`, times the slope of the cap, over the logits; `[chunk, 1]` but those."""
    x, columns = _final_logits(logits, real_rows, softcap)
    delta = ((x - log_total).exp() - (columns == column).float()) * factor
    if softcap is not None:
        delta = delta * (1.0 - (logits.float() / softcap).tanh().square())
    logits.copy_(delta)
