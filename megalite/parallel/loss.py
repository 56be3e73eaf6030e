"""Cross-entropy of a vocabulary-cut output head that never holds the logits of a whole sequence.

In: hidden states and the local rows of the head `[vocab/tp, hidden]`; out: the summed loss of the valid tokens.
Tokens go through in chunks: logits, their softmax and both gradients of a chunk are computed at once and only the
gradients are kept, so there is no second GEMM in backward. The head's is not kept either where somebody sums it in fp32
(`gradient_sums`): the GEMMs add to that sum in forward.

What lies between the GEMMs exists twice. `_softmax` goes over an fp32 copy of a chunk's logits operation by operation,
which suits chunks that stay in a CPU's caches. `_compiled_softmax` is for GPUs: two generated kernels, of which one
reads the logits as the GEMM left them and the other writes their gradient in their place. A test counts their bytes.

The factor on the loss, 1/tokens, goes into the gradient of the logits. In fp16 most of a large vocabulary's
probabilities would be subnormal then, and without it the sum over a chunk's tokens would overflow. So both gradients
are fp32 there until backward has scaled them, and what goes into their GEMMs is multiplied by `FP16_SCALE` instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.parallel.collectives import TensorParallel, all_gather, enter_parallel_region
from megalite.parallel.fused_passes import fused
from megalite.parallel.gradient_accumulation_fusion import add_product, sum_in_place, wide_product
from megalite.parallel.linear import multipliable
from megalite.parallel.softmax_passes import differentiate_, reduce_rows

IGNORED = -100  # the target of a token that carries no loss, as in torch and transformers
# of logits alive at once. Small chunks stay in a CPU's caches; on a GPU each chunk is one more pass over the fp32
# gradient of the head, and 4,096 tokens of a vocabulary of 128k fit
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
CHUNK_TOKENS = 128  # at least, or the GEMM starves
Factor = Tensor | float  # on the device, if it is no constant
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
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    tp: TensorParallel,
    softcap: float | None = None,
    is_compiled: bool = False,
    token_losses: Tensor | None = None,
    factor: Factor = 1.0,
) -> Tensor:
    """Returns `factor` x the negative log likelihood summed over valid tokens, an fp32 scalar equal on all
    tensor-parallel ranks.

    hidden `[batch, seq(/tp), hidden]`, weight `[padded vocab/tp, hidden]`, targets `[batch, seq]` (-100: no loss);
    softcap as in `head_logits`; is_compiled: by generated kernels. `token_losses`, contiguous fp32 `[batch, seq]`, is
    filled with the summands, which are 0 where there is no loss. Of a weight that names `gradient_sums` backward has to
    begin at the loss, which it does with 1: the weight's gradient is in its sum by then. Another gradient becomes NaN.
    """
    hidden = enter_parallel_region(hidden, tp)
    first = tp.rank * weight.shape[0]
    real = max(0, min(weight.shape[0], vocab_size - first))
    part = _VocabularyPart(first, weight.shape[0], real, softcap, tp)
    losses = None if token_losses is None else token_losses.view(-1)
    total = sum_in_place(weight)
    # the gradient of hidden states carries what an infinite loss makes of gradients
    weight_sum = None if total is None or not hidden.requires_grad or hidden.dtype == torch.float16 else total()
    rows, targets = hidden.flatten(0, -2), targets.flatten()
    return _HeadLoss.apply(rows, weight, targets, part, is_compiled, losses, factor, weight_sum)


class _VocabularyPart(NamedTuple):
    """The rows of the vocabulary that this rank holds, and what becomes of their logits."""

    first: int
    rows: int
    real_rows: int  # the rest is padding
    softcap: float | None
    tp: TensorParallel


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        part: _VocabularyPart,
        is_compiled: bool,
        token_losses: Tensor | None,
        factor: Factor,
        weight_sum: Tensor | None,
    ) -> Tensor:
        needs_grad = any(ctx.needs_input_grad)
        head = multipliable(weight)
        softmax = _compiled_softmax if is_compiled else _softmax
        chunk = _chunk_tokens(part.rows, hidden.device.type, head.element_size() if is_compiled else 4)
        ctx.dtype, is_fp16 = hidden.dtype, hidden.dtype == torch.float16
        # of both gradients, and what backward is to multiply them by
        scale, ctx.scale = (FP16_SCALE, factor / FP16_SCALE) if is_fp16 else (factor, None)
        hidden_grad = torch.empty_like(hidden, dtype=torch.float32 if is_fp16 else head.dtype) if needs_grad else None
        weight_grad = weight_sum
        if weight_grad is None and ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for x, target, x_grad, losses in zip(
            hidden.split(chunk),
            targets.split(chunk),
            _split(hidden_grad, hidden.shape[0], chunk),
            _split(token_losses, hidden.shape[0], chunk),
            strict=True,
        ):
            x = x.to(head.dtype)
            logits = x @ head.t()  # [chunk, vocab/tp]
            loss, delta = softmax(logits, target, part, scale if needs_grad else None, losses)
            total += loss
            if delta is not None and x_grad is not None:
                if is_fp16:
                    x_grad.copy_(wide_product(delta, head))
                else:
                    torch.mm(delta, head, out=x_grad)
                if weight_grad is not None:
                    add_product(weight_grad, delta, x)
            del logits, delta  # before the next chunk's
        if needs_grad:
            ctx.save_for_backward(hidden_grad, weight_grad if weight_sum is None else None)
        ctx.is_summed = weight_sum is not None
        return total.mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        if ctx.is_summed:
            grad = torch.where(grad == 1.0, grad, torch.nan)
        elif ctx.scale is not None:
            grad = grad * ctx.scale
        if weight_grad is not None:  # in place, so backward can run only once
            weight_grad = weight_grad.mul_(grad).to(ctx.dtype)
        return hidden_grad.mul_(grad).to(ctx.dtype), weight_grad, *(None,) * 6


def _chunk_tokens(rows: int, device: str, number_bytes: int) -> int:
    tokens = CHUNK_BYTES[device] // (number_bytes * rows)
    # GEMMs on a GPU prefer whole tiles
    return max(CHUNK_TOKENS, tokens if device == "cpu" else tokens - tokens % CHUNK_TOKENS)


def _softmax(
    logits: Tensor, target: Tensor, part: _VocabularyPart, scale: Factor | None, token_losses: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the summed loss of a chunk, and `scale` x d loss / d logits in the format of `logits` `[chunk, rows]`,
    which it may overwrite; no gradient without a scale. target `[chunk]`; the summands go to token_losses `[chunk]`."""
    dtype, logits = logits.dtype, logits.float()
    slope = None if part.softcap is None else _cap_(logits, part.softcap)
    if part.real_rows < part.rows:
        logits[:, part.real_rows :] = float("-inf")
    valid = target != IGNORED
    local_target = (target - part.first).clamp_(0, part.rows - 1)
    is_mine = valid & (target >= part.first) & (target < part.first + part.rows)
    picked = logits.gather(1, local_target.unsqueeze(1)).squeeze(1).masked_fill(~is_mine, 0.0)
    # softmax in place: the loss's exponentials serve its gradient too. A rank with only padding has no maximum
    top = logits.amax(dim=1).clamp_(min=torch.finfo(torch.float32).min)
    exponential = logits.sub_(top.unsqueeze(1)).exp_()
    log_total, picked = _over_vocabulary(exponential.sum(dim=1).log_().add_(top), picked, part.tp)
    loss = torch.mul(log_total - picked, valid, out=token_losses).sum()
    if scale is None:
        return loss, None
    # d loss / d logits = softmax - one_hot, zero where there is no loss
    delta = exponential.mul_(((top - log_total).exp_() * (valid * scale)).unsqueeze(1))
    delta.scatter_add_(1, local_target.unsqueeze(1), (is_mine * -scale).unsqueeze(1))
    return loss, (delta if slope is None else delta.mul_(slope)).to(dtype)


def _compiled_softmax(
    logits: Tensor, target: Tensor, part: _VocabularyPart, scale: Factor | None, token_losses: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Does the same as `_softmax` in two passes over the logits."""
    cut = part.real_rows, part.softcap
    valid, column = target != IGNORED, (target - part.first).unsqueeze(1)
    log_sum, picked = fused(reduce_rows, *cut)(logits, column)
    log_total, picked = _over_vocabulary(log_sum, picked, part.tp)
    loss = torch.mul(log_total - picked, valid, out=token_losses).sum()
    if scale is None:
        return loss, None
    fused(differentiate_, *cut)(logits, column, log_total.unsqueeze(1), (valid * scale).unsqueeze(1))
    return loss, logits


def _cap_(logits: Tensor, softcap: float) -> Tensor:
    """Caps logits in place; returns the derivative `1 - tanh(x / softcap)^2`, a second buffer of the chunk."""
    logits.div_(softcap).tanh_()
    slope = logits.square().neg_().add_(1.0)
    logits.mul_(softcap)
    return slope


def _split(x: Tensor | None, length: int, chunk: int) -> tuple[Tensor | None, ...]:
    return (None,) * -(-length // chunk) if x is None else x.split(chunk)


def _over_vocabulary(log_sum: Tensor, picked: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Combines the ranks' log-sum-exp and target logit `[chunk]` over the whole vocabulary, in one collective."""
    if tp.size == 1:
        return log_sum, picked
    ranks = all_gather(torch.stack((log_sum, picked)).unsqueeze(0), tp, dim=0)  # [tp, 2, chunk]
    return torch.logsumexp(ranks[:, 0], dim=0), ranks[:, 1].sum(dim=0)
