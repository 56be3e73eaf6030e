"""Context parallelism: which part of a sequence a rank has, and what ranks that share sequences exchange in attention.

Outside of attention every token is computed alone, so a rank computes its own. In attention it needs others, by kind:

- `all_gather`: keys and values of all tokens, for the queries of its own. Of a sequence that is cut in 2 cp chunks rank
  r has chunks r and 2 cp - 1 - r, so that causal attention is as much work on every rank (Dubey 2024, section 3.3.2);
- `ulysses`: all tokens of some heads (Jacobs 2023); a rank has one chunk. Of fewer key/value heads than ranks each is
  sent to several.

The weights are whole on every rank, which counts as a replica of them: gradients, norm and ZeRO are those of replicas.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from megalite.parallel.collectives import ContextParallel, TensorParallel, begin_all_gather, reduce_scatter

CPU = torch.device("cpu")


def own_spans(length: int, cp: ContextParallel) -> tuple[range, ...]:
    """Returns the places of this rank's tokens in a sequence of `length`, in the order in which it holds them."""
    size = length // chunks(cp)
    numbers = (cp.rank, 2 * cp.size - 1 - cp.rank) if chunks(cp) > cp.size else (cp.rank,)
    return tuple(range(number * size, (number + 1) * size) for number in numbers)


def chunks(cp: ContextParallel) -> int:
    """Returns the number of chunks that a sequence is cut into."""
    return 2 * cp.size if cp.size > 1 and cp.kind == "all_gather" else cp.size


def own_places(rows: int, tp: TensorParallel, device: torch.device = CPU) -> Tensor:
    """Returns the places in their sequence of the `rows` tokens between the parallel parts, `[rows]` int64."""
    first = tp.rank * rows if tp.sequence_is_cut else 0
    if tp.context.size == 1:
        return torch.arange(first, first + rows, device=device)
    return sequence_places(rows * tp.sequence_parts, tp.context, device)[first : first + rows]


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def sequence_places(length: int, cp: ContextParallel, device: torch.device = CPU) -> Tensor:
    """Returns the places of this rank's tokens in a sequence of `length`, `[length/cp]` int64."""
    return torch.cat([torch.arange(at.start, at.stop, device=device) for at in own_spans(length, cp)])


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        stacked = begin_all_gather(x, cp).wait().unflatten(0, (cp.size, -1))  # [cp, batch, seq/cp, ...]
        early, late = stacked.chunk(2, dim=2)  # of ranks 0, 1 ... the chunks 0, 1 ... and, from the end, the last ones
        return torch.cat((*early.unbind(), *late.unbind()[::-1]), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cp = ctx.cp
        pieces = grad.unflatten(1, (2 * cp.size, -1)).transpose(0, 1)  # [chunks, batch, seq/chunks, ...]
        early, late = pieces.split(cp.size)
        pieces = torch.cat((early, late.flip(0)), dim=2)
        return reduce_scatter(pieces.flatten(0, 1), cp, 0), None


def gather_tokens(x: Tensor, cp: ContextParallel) -> Tensor:
    """Gathers the tokens of all ranks, of which each has two chunks, in their order: `[batch, seq/cp, ...]` ->
    `[batch, seq, ...]`; backward adds up what the ranks' queries contribute."""
    return _GatherTokens.apply(x, cp)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        return _exchanged(x, cp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.cp), None


def _exchanged(x: Tensor, cp: ContextParallel) -> Tensor:
    """Sends slice i of the first dim to rank i; what rank i has sent is slice i of the result."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        assert cp.group is not None
        return functional.all_to_all_single(x, None, None, cp.group)
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=cp.group)
    return received


def tokens_of_heads(x: Tensor, cp: ContextParallel) -> Tensor:
    """Exchanges heads for tokens: `[batch, seq/cp, heads, head_dim]` -> `[batch, seq, heads/cp, head_dim]`."""
    if x.shape[2] < cp.size:
        x = x.repeat_interleave(cp.size // x.shape[2], dim=2)
    sent = x.unflatten(2, (cp.size, -1)).movedim(2, 0)
    return _Exchange.apply(sent, cp).movedim(0, 1).flatten(1, 2)


def heads_of_tokens(x: Tensor, cp: ContextParallel) -> Tensor:
    """Undoes `tokens_of_heads`, of all heads."""
    sent = x.unflatten(1, (cp.size, -1)).movedim(1, 0)
    return _Exchange.apply(sent, cp).movedim(0, 2).flatten(2, 3)
