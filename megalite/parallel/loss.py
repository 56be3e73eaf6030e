"""Cross-entropy of a vocabulary-cut output head that never holds the logits of a whole sequence.

In: hidden states and the local rows of the head `[vocab/tp, hidden]`; out: the summed loss of the valid tokens.
Tokens go through in chunks: logits, their softmax and both gradients of a chunk are computed at once and only the
gradients are kept, so there is no second GEMM in backward and no fp32 copy of the logits.

In fp16 the sum over a chunk's tokens, which neither 1/tokens nor the loss scale has made smaller yet, would overflow,
and most of a large vocabulary's probabilities would be subnormal. So both gradients are fp32 there until backward has
scaled them, and what goes into their GEMMs is multiplied by `FP16_SCALE`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.parallel.collectives import TensorParallel, all_gather, enter_parallel_region
from megalite.parallel.linear import multipliable

IGNORED = -100  # the target of a token that carries no loss, as in torch and transformers
# fp32 logits alive at once: small chunks stay in a CPU's caches, but accumulate the head's gradient more often
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
CHUNK_TOKENS = 128  # at least, or the GEMM starves
FP16_SCALE = 2.0**15  # softmax - one_hot is at most 1, and fp16 ends at 65504


def head_logits(
    hidden: Tensor, weight: Tensor, vocab_size: int, tp: TensorParallel, softcap: float | None = None
) -> Tensor:
    """Returns whole logits `[batch, seq, vocab]` on every rank, for evaluation and sampling; no gradient across ranks.

    With `softcap` logits x become `softcap * tanh(x / softcap)` (Gemma 2).
    """
    local = torch.nn.functional.linear(enter_parallel_region(hidden, tp), weight)
    if softcap is not None:
        local = (local / softcap).tanh() * softcap
    return all_gather(local, tp, dim=-1)[..., :vocab_size]


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, tp: TensorParallel, softcap: float | None = None
) -> Tensor:
    """Returns the negative log likelihood summed over valid tokens, an fp32 scalar equal on all tensor-parallel ranks.

    hidden `[batch, seq(/tp), hidden]`, weight `[padded vocab/tp, hidden]`, targets `[batch, seq]` (-100: no loss);
    softcap as in `head_logits`.
    """
    hidden = enter_parallel_region(hidden, tp)
    return _HeadLoss.apply(hidden.flatten(0, -2), weight, targets.flatten(), vocab_size, tp, softcap)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        tp: TensorParallel,
        softcap: float | None,
    ) -> Tensor:
        needs_grad = any(ctx.needs_input_grad)
        rows = weight.shape[0]
        first = tp.rank * rows
        real_rows = max(0, min(rows, vocab_size - first))  # the rest is padding
        chunk = max(CHUNK_TOKENS, CHUNK_BYTES[hidden.device.type] // (4 * rows))
        head = multipliable(weight)
        ctx.dtype, is_fp16 = hidden.dtype, hidden.dtype == torch.float16
        ctx.scale = FP16_SCALE if is_fp16 else 1.0  # of both gradients, until backward
        hidden_grad = torch.empty_like(hidden, dtype=torch.float32 if is_fp16 else head.dtype) if needs_grad else None
        weight_grad: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for x, target, x_grad in zip(
            hidden.split(chunk),
            targets.split(chunk),
            _split(hidden_grad, hidden.shape[0], chunk),
            strict=True,
        ):
            x = x.to(head.dtype)
            logits = (x @ head.t()).float()  # [chunk, vocab/tp]
            slope = None if softcap is None else _cap_(logits, softcap)
            if real_rows < rows:
                logits[:, real_rows:] = float("-inf")
            valid = target != IGNORED
            local_target = (target - first).clamp_(0, rows - 1)
            is_mine = valid & (target >= first) & (target < first + rows)
            picked = logits.gather(1, local_target.unsqueeze(1)).squeeze(1).masked_fill(~is_mine, 0.0)
            # softmax in place: the loss's exponentials serve its gradient too. A rank with only padding has no maximum
            top = logits.amax(dim=1).clamp_(min=torch.finfo(torch.float32).min)
            exponential = logits.sub_(top.unsqueeze(1)).exp_()
            log_total, picked = _over_vocabulary(exponential.sum(dim=1).log_().add_(top), picked, tp)
            total += ((log_total - picked) * valid).sum()
            if x_grad is None:
                continue
            # d loss / d logits = softmax - one_hot, zero where there is no loss
            probability = exponential.mul_(((top - log_total).exp_() * valid).unsqueeze(1))
            probability.scatter_add_(1, local_target.unsqueeze(1), -is_mine.unsqueeze(1).to(probability.dtype))
            delta = probability if slope is None else probability.mul_(slope)
            delta = (delta.mul_(FP16_SCALE) if is_fp16 else delta).to(head.dtype)
            if is_fp16:
                x_grad.copy_(_wide_product(delta, head))
            else:
                torch.mm(delta, head, out=x_grad)
            weight_grad = _accumulate(weight_grad, delta, x)
        if needs_grad:
            ctx.save_for_backward(hidden_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        grad = grad / ctx.scale
        # `grad` holds 1/tokens and the loss scale; in place, so backward can run only once
        return hidden_grad.mul_(grad).to(ctx.dtype), weight_grad.mul_(grad).to(ctx.dtype), None, None, None, None


def _cap_(logits: Tensor, softcap: float) -> Tensor:
    """Caps logits in place; returns the derivative `1 - tanh(x / softcap)^2`, a second buffer of the chunk."""
    logits.div_(softcap).tanh_()
    slope = logits.square().neg_().add_(1.0)
    logits.mul_(softcap)
    return slope


def _split(x: Tensor | None, length: int, chunk: int) -> tuple[Tensor | None, ...]:
    return (None,) * -(-length // chunk) if x is None else x.split(chunk)


def _accumulate(total: Tensor | None, delta: Tensor, x: Tensor) -> Tensor:
    """Returns `total + delta^T x`, summed over chunks in fp32 whatever the GEMM's dtype."""
    if total is not None and total.dtype == delta.dtype:
        return total.addmm_(delta.t(), x)
    product = _wide_product(delta.t(), x) if delta.dtype == torch.float16 else torch.mm(delta.t(), x)
    return product.float() if total is None else total.add_(product)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of two fp16 matrices in fp32, in which the GEMM sums it."""
    if a.device.type == "cpu":  # torch 2.13 has such a GEMM on CUDA only
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def _over_vocabulary(log_sum: Tensor, picked: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Combines the ranks' log-sum-exp and target logit `[chunk]` over the whole vocabulary, in one collective."""
    if tp.size == 1:
        return log_sum, picked
    ranks = all_gather(torch.stack((log_sum, picked)).unsqueeze(0), tp, dim=0)  # [tp, 2, chunk]
    return torch.logsumexp(ranks[:, 0], dim=0), ranks[:, 1].sum(dim=0)
