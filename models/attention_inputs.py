"""Inputs of attention beside hidden states: angles, masks and boundaries of documents.

In: the positions of a micro-batch, `[batch, seq]`, 0 where a document starts, or None if each row is one document. Out:
`AttentionInputs`, made once per micro-batch for all layers of one kind, so that no layer builds a mask of its own.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.rope import Rope, fixed_rotation, rotation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Kernel = Literal["fused", "varlen", "flex", "explicit"]
"""Computation of attention: torch's fused one with or without a mask, flash attention over documents of any length,
FlexAttention, or products of ours that hold all scores."""

AttentionChoice = Literal["auto", "sdpa"]
FLASH_DTYPES = (torch.bfloat16, torch.float16)
MOST_FLASH_HEAD_DIM = 256


class AttentionKind(NamedTuple):
    """Properties by which layers need different `AttentionInputs` in one micro-batch."""

    kernel: Kernel
    rope: Rope | None
    window: int | None  # None also where no token is outside of it
    dtype: torch.dtype  # of queries and keys
    cached: int = 0  # tokens before the first one


class AttentionInputs(NamedTuple):
    """Tensors that the attention of all layers of a kind shares in a micro-batch."""

    kernel: Kernel
    cos: Tensor | None = None  # [batch|1, seq, 1, pairs]; None: nothing is rotated
    sin: Tensor | None = None
    # [(batch, 1,) queries, keys]: True where a token is seen for `explicit`, 0 or -inf for `fused`; None: causal
    mask: Tensor | None = None
    boundaries: Tensor | None = None  # [documents or more + 1] int32, of the tokens of all rows, for `varlen`
    block_mask: BlockMask | None = None  # for `flex`


def attention_inputs(
    kind: AttentionKind,
    shape: tuple[int, int],
    device: torch.device,
    positions: Tensor | None = None,
    documents: int | None = None,
) -> AttentionInputs:
    """Makes the inputs of layers of `kind` for a micro-batch of `shape` [batch, seq].

    documents: their number in the micro-batch; None: `varlen` reads it from the device, which waits.
    """
    seq, window = shape[1], kind.window
    cos = sin = None
    if kind.rope is not None and positions is not None:
        cos, sin = rotation(positions, kind.rope, kind.dtype)
    elif kind.rope is not None:
        cos, sin = fixed_rotation(seq, kind.rope, device, kind.dtype, kind.cached)
    if kind.kernel == "varlen":
        boundaries = row_boundaries(*shape, device) if positions is None else document_boundaries(positions, documents)
        return AttentionInputs(kind.kernel, cos, sin, boundaries=boundaries)
    if kind.kernel == "flex":
        return AttentionInputs(kind.kernel, cos, sin, block_mask=_block_mask(shape, window, device, positions))
    mask = _mask(seq, seq + kind.cached, window, device, positions)
    if kind.kernel == "explicit":
        return AttentionInputs(kind.kernel, cos, sin, causal_mask(seq, seq, None, device) if mask is None else mask)
    if mask is not None:
        mask = added_to_scores(mask, kind.dtype) if positions is None else numbers_of(mask, kind.dtype)
    return AttentionInputs(kind.kernel, cos, sin, mask)


def _mask(queries: int, keys: int, window: int | None, device: torch.device, positions: Tensor | None) -> Tensor | None:
    """Returns the mask of the last `queries` of `keys` tokens, True where a token is seen; None: causal."""
    if positions is not None:
        return document_mask(positions, window)
    if window is not None:
        keys = min(keys, window + queries - 1)  # those that the window of the first query still contains
        window = window if window < keys else None
    if queries == 1 or (queries == keys and window is None):
        return None
    return causal_mask(queries, keys, window, device)


def document_mask(positions: Tensor, window: int | None = None) -> Tensor:
    """Returns the causal mask within documents, `[batch, 1, seq, seq]`; positions `[batch, seq]`, 0 at a start."""
    seq = positions.shape[1]
    document = (positions == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & causal_mask(seq, seq, window, positions.device)).unsqueeze(1)


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # training may reuse a mask that generation has cached
def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns `[queries, keys]` for the last `queries` of `keys` tokens, made once for all layers and steps."""
    newest = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(newest)
    return seen if window is None else seen.triu_(newest - window + 1)


def numbers_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a mask to 0 or -inf: from a bool mask torch's attention makes these anew in every layer, and each layer
    keeps its own for backward."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


@lru_cache(maxsize=2)  # keyed by the identity of the tensor
@torch.inference_mode(False)
def added_to_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Caches `numbers_of` a `causal_mask`."""
    return numbers_of(mask, dtype)


def count_documents(positions: Tensor) -> Tensor:
    """Counts the documents of positions `[batch, seq]`; every row begins with a new one."""
    return (positions[:, 1:] == 0).sum() + len(positions)


def document_boundaries(positions: Tensor, documents: int | None) -> Tensor:
    """Returns the first token of each document, counted through all rows, and the number of tokens, int32.

    Empty documents at the end make their number a power of two, or the number of tokens: compiled blocks have a graph
    for every number.
    """
    count = int(count_documents(positions)) if documents is None else documents
    starts = positions == 0
    starts[:, 0] = True
    total = positions.numel()
    tokens = torch.arange(total, dtype=torch.int32, device=positions.device)
    # sorted instead of looked up, because the number of those found would have to be read from the device
    found = torch.where(starts.flatten(), tokens, total).sort().values
    power = 1 << (count - 1).bit_length()
    return F.pad(found, (0, 1), value=total)[: min(power, total) + 1]


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def row_boundaries(batch: int, seq: int, device: torch.device) -> Tensor:
    """Caches the boundaries of rows that are one document each."""
    return torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=device)


def _block_mask(
    shape: tuple[int, int], window: int | None, device: torch.device, positions: Tensor | None
) -> BlockMask:
    """Returns FlexAttention's mask: which blocks of 128 x 128 scores exist; no tensor of all scores is made."""
    if positions is None:
        return _causal_block_mask(shape[1], window, device)
    document = (positions == 0).cumsum(dim=1)
    return _made_block_mask(shape, window, device, document)


@lru_cache(maxsize=4)
def _causal_block_mask(seq: int, window: int | None, device: torch.device) -> BlockMask:
    return _made_block_mask((1, seq), window, device, None)


def _made_block_mask(
    shape: tuple[int, int], window: int | None, device: torch.device, document: Tensor | None
) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen &= query - key < window
        return seen if document is None else seen & (document[row, query] == document[row, key])

    # not compiled it makes all scores' places first
    make = create_block_mask if device.type == "cpu" else torch.compile(create_block_mask)
    rows = None if document is None else shape[0]
    made: BlockMask = make(is_seen, rows, None, shape[1], shape[1], device=str(device))
    return made


@lru_cache(maxsize=1)
def why_no_varlen() -> str | None:
    """Returns why documents and windows need a mask on a GPU; None if flash attention takes them."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    missing = {"scale", "window_size", "enable_gqa"} - inspect.signature(varlen_attn).parameters.keys()
    return f"torch {torch.__version__}'s varlen_attn does not take {', '.join(sorted(missing))}" if missing else None


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why documents and windows are masks over all scores; None if flash attention takes their boundaries."""
    if device.type != "cuda":
        return "flash attention needs a GPU"
    if dtype not in FLASH_DTYPES:
        return f"flash attention takes bf16 and fp16, not {dtype}"
    if head_dim > MOST_FLASH_HEAD_DIM or head_dim % 8:
        return f"flash attention takes heads of at most {MOST_FLASH_HEAD_DIM} features, a multiple of 8"
    return why_no_varlen()


def fused_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, is_masked: bool
) -> Literal["fused", "flash", "memory-efficient"]:
    """Returns the name of the kernel behind torch's fused attention: `fused` is a CPU's. Of a GPU's two only flash
    attention takes grouped heads; torch would answer the others with all scores in memory."""
    if device.type == "cpu":
        return "fused"
    is_flash = not is_masked and dtype in FLASH_DTYPES and head_dim <= MOST_FLASH_HEAD_DIM
    return "flash" if is_flash else "memory-efficient"


def why_not_flex(device: torch.device, head_dim: int) -> str | None:
    """Returns why capped scores exist in memory; None if FlexAttention caps them in its kernel."""
    if device.type != "cuda":  # on a CPU it has no gradient
        return "FlexAttention's gradient needs a GPU"
    if head_dim < 16 or head_dim & (head_dim - 1):
        return "FlexAttention takes heads of 16, 32, 64 ... features"
    return None
