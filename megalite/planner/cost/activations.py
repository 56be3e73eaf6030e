"""Activations that our decoder keeps from forward to backward, in bytes per rank.

Letters as in the papers: s tokens of a sequence, b sequences of a micro-batch, h hidden size, a heads,
t tensor-parallel ranks, p stages, v model chunks of a stage, L blocks. Pure arithmetic, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

from megalite.config import ModelConfig
from megalite.config.sections import ContextParallelKind, Dtype
from megalite.planner.cost.stage_parameters import block_kinds, cut, scores_exist
from megalite.planner.workload import BYTES, Recompute, TrainingWorkload


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block of our decoder and one micro-batch on one rank."""

    kept: float  # from forward to backward
    postponed: float  # from input gradient to weight gradient, where backward is split
    backward: float  # beside what all blocks keep, while backward is in the last: recomputed numbers and gradients
    passing: float  # hidden states between blocks


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of the blocks of one chunk of a stage."""

    kept: float  # of a micro-batch, by all of them, from forward to backward
    postponed: float  # the same from input gradient to weight gradient
    first: BlockBytes
    last: BlockBytes


class BlockWorkload(NamedTuple):
    """The facts of a job on which the bytes of its blocks depend: most of thousands of layouts share them."""

    model: ModelConfig
    tensor_parallel_size: int
    sequence_parallel: bool
    recompute: Recompute | tuple[Recompute, ...]
    micro_batch_size: int
    sequence_length: int
    context_parallel_size: int
    context_parallel_kind: ContextParallelKind
    dtype: Dtype
    document_mask: bool

    @classmethod
    def of(cls, job: TrainingWorkload) -> Self:
        of = job.layout
        layout = of.tensor_parallel_size, of.sequence_parallel, of.recompute, of.micro_batch_size
        context = of.context_parallel_size, of.context_parallel_kind
        return cls(job.model, *layout, job.sequence_length, *context, job.dtype, job.document_mask)


@lru_cache(maxsize=4096)
def chunk_bytes(job: BlockWorkload, first: int, count: int, widens: bool) -> ChunkBytes:
    """Returns the bytes of `count` consecutive blocks. `widens`: products are computed in fp32."""
    like = block_kinds(job.model)[first : first + count]
    blocks = {layer: _block_bytes(job, layer, widens) for layer in set(like)}
    kept, postponed = (sum(getattr(blocks[layer], name) for layer in like) for name in ("kept", "postponed"))
    return ChunkBytes(kept, postponed, blocks[like[0]], blocks[like[-1]])


def _block_bytes(job: BlockWorkload, layer: int, widens: bool) -> BlockBytes:
    block = _Block(job, layer, widens)
    everything = block.outside + block.attention + block.context + block.feed_forward
    recompute = job.recompute
    assert isinstance(recompute, str), "figures of stages that recompute differently are asked for by_stage"
    match recompute:
        case "none":
            return BlockBytes(everything, block.postponed, block.backward(0.0), block.input)
        case "selective":
            again, kept = 0.0, everything
            if block.is_explicit:  # what attention reads is kept, and what the projection behind it reads
                again = block.attention + block.context - block.projection_input
                attention = block.projected + block.projection_input
                kept = min(everything, block.outside + attention + block.feed_forward)
            kept -= block.normed + block.activated
            return BlockBytes(kept, block.postponed, block.backward(again), block.input)
        case "full":
            again = everything - block.input
            return BlockBytes(block.input, block.postponed, again + block.backward(0.0), block.input)


class _Block:
    """Bytes that the functions of models/ and megalite/parallel/ save for backward; each storage is counted once."""

    def __init__(self, job: BlockWorkload, layer: int, widens: bool) -> None:
        model, tp = job.model, job.tensor_parallel_size
        self.job, self.model, self.layer, self.size = job, model, layer, BYTES[job.dtype]
        self.is_cut = job.sequence_parallel and tp > 1
        self.tp, self.batch, self.cp = tp, job.micro_batch_size, job.context_parallel_size
        self.tokens = self.batch * job.sequence_length // self.cp
        self.gathers_keys = self.cp > 1 and job.context_parallel_kind == "all_gather"
        self.heads = model.num_attention_heads // tp
        self.q = self.heads * model.head_dim  # features of a token
        self.qkv = self.q + 2 * max(model.num_key_value_heads // tp, 1) * model.head_dim
        self.attention_size = 4 if widens else self.size  # of q, k, v and what attention puts out
        self.square = job.sequence_length**2 / self.cp  # of a sequence, scores of one head on each rank, or on one
        if self.gathers_keys:  # of two chunks, whose keys end with them
            self.square *= (2 * self.cp + 1) / (4 * self.cp)
        self.scores = self.batch * self.heads * self.square  # numbers
        self.is_explicit = scores_exist(model)
        self.hidden = self.tokens * model.hidden_size * self.size  # whole, as products read it
        self.input = self.hidden / tp if self.is_cut else self.hidden  # as the blocks pass it on
        self.projected = self.tokens * self.qkv * self.size  # q, k and v before rotation
        value = self.heads * (model.v_head_dim or model.head_dim)
        self.projection_input = self.tokens * value * self.size  # what the output projection reads
        # of a cut sequence products keep a slice, except that a router keeps the whole, as experts read it
        has_experts, is_normed = model.has_experts(layer), model.norm_placement != "post"
        self.normed = (1 if has_experts else 2) * self.input * is_normed  # that norms put out for products
        self.gathered = self.hidden if self.is_cut else 0.0  # once more in backward
        self.outside = self._outside()
        self.attention, self.context = self._attention()
        self.feed_forward, self.feed_forward_gradients = self._feed_forward()
        self.activated = self._activated()  # what the activation puts out, unless that is what it keeps itself
        self.postponed = self._postponed()

    def backward(self, recomputed: float) -> float:
        """Returns the most that backward needs beside kept tensors: in the feed-forward layer, or later in
        attention."""
        gone = self.feed_forward + self.normed / 2
        # gradients of q, k, v, the projection and the context, and of two copies of the scores
        scores = 2 * self.scores * max(4, self.attention_size) if self.is_explicit else 0.0
        gradients = (2 * self.qkv + self.q) * self.tokens * self.attention_size + self.hidden + scores
        in_attention = recomputed + gradients + self.gathered - gone
        return max(self.feed_forward_gradients, in_attention)

    def _outside(self) -> float:
        """Returns the bytes of hidden states that norms, projections and dropout keep (models/decoder.py)."""
        model, kept = self.model, self.input  # of the block
        if not model.use_parallel_residual:
            kept += self.input  # between attention and feed-forward layer
        kept += self.normed
        if model.has_experts(self.layer) and (self.is_cut or model.norm_placement != "post"):
            kept += self.hidden  # gathered, or normed
            if self.is_cut and model.n_shared_experts and model.norm_placement != "post":
                kept += self.input  # normed: shared experts keep their slice
        if model.norm_placement != "pre":
            kept += 2 * self.input  # what attention and feed-forward layer put out: norms read it
        norms = {"pre": 2, "post": 2, "pre_and_post": 4}[model.norm_placement]
        numbers = 2 if model.normalization == "layernorm" else 1  # of each token, in fp32
        kept += norms * numbers * 4 * self.input / (model.hidden_size * self.size)
        if model.residual_dropout > 0:
            kept += 2 * self.input / self.size  # masks, a byte a number
        if model.query_key_norm == "full_width":
            kept += self.projected  # its norms keep their inputs
        return kept

    def _attention(self) -> tuple[float, float]:
        """Returns the bytes that selective recomputation recomputes, and those of attention's output
        (models/attention.py)."""
        model, wide = self.model, self.attention_size
        rotates, norms_heads = model.rotary_dim(self.layer) > 0, model.query_key_norm == "per_head"
        inside = self.projected if norms_heads else 0.0  # norms keep views of it, and so does attention of v
        if self.gathers_keys:
            inside += (self.qkv - self.q) * self.tokens * self.cp * wide
        # once more as attention puts it out, before a cast, or before it is exchanged or joined
        is_copied = wide != self.size or self.cp > 1 or (model.v_head_dim or model.head_dim) < model.head_dim
        context = self.projection_input + (self.tokens * self.q * wide if is_copied else 0)
        inside += self._latents()
        if self.is_explicit:
            return inside + self._explicit(), context
        if norms_heads:
            inside += (self.qkv + self.q) / 2 * self.tokens * wide  # q and k
        elif rotates or wide != self.size:
            inside += self.qkv * self.tokens * wide
        else:
            inside += self.projected
        inside += 4 * self.tokens * self.heads  # log of the sum of exponentials
        return inside, context

    def _latents(self) -> float:
        """Returns the bytes of latents, which their norms keep, of normed ones, which products keep, and of a number
        for each in fp32 (models/latent_attention.py)."""
        model = self.model
        if model.kv_lora_rank is None:
            return 0.0
        made = model.kv_lora_rank + (model.q_lora_rank or 0)
        numbers = (2 * made + (model.qk_rope_head_dim or 0)) * self.size + 4 * (1 + (model.q_lora_rank is not None))
        return self.tokens * numbers / (self.tp if self.is_cut else 1)

    def _explicit(self) -> float:
        """Returns the bytes of all scores: softmax in fp32, its cast, dropout's mask and output, tanh of the cap,
        the mask."""
        wide, per_score = self.attention_size, 4
        drops, caps = self.model.attention_dropout > 0, self.model.attn_logit_softcapping is not None
        per_score += wide if drops or wide != 4 else 0
        per_score += (1 if drops else 0) + (wide if caps else 0)
        masks = self.square * (self.batch if self.job.document_mask else 1)
        return self.scores * per_score + masks + 3 * self.q * self.tokens * wide

    def _feed_forward(self) -> tuple[float, float]:
        """Returns the bytes kept and those of gradients (models/feed_forward.py, models/experts.py)."""
        model = self.model
        if not model.has_experts(self.layer):
            features = cut(model.intermediate_size, self.tp) * self.tokens * self.size
            # in the activation's backward, or in that of the projection in front of it
            if model.gated_mlp:
                gradients = max(3 * features, 2 * features + self.gathered) + self.hidden
                return (3 if model.hidden_act == "silu" else 4) * features, gradients
            return (1 if model.hidden_act == "relu" else 2) * features, features + self.gathered + self.hidden
        rows = self.tokens * model.num_experts_per_tok
        features = cut(model.moe_intermediate_size, self.tp) * rows * self.size
        numbers = rows * model.hidden_size
        routing = self.tokens * 4 * (model.num_experts or 1) + rows * (3 * 8 + 2 * 4)
        shared = 3 * cut(model.shared_size, self.tp) * self.tokens * self.size
        kept = 2 * numbers * self.size + 3 * features + routing + shared
        return kept, 3 * features + 2 * numbers * 4 + self.hidden

    def _activated(self) -> float:
        model = self.model
        if model.has_experts(self.layer) or (model.hidden_act == "relu" and not model.gated_mlp):
            return 0.0
        return cut(model.intermediate_size, self.tp) * self.tokens * self.size

    def _postponed(self) -> float:
        """Returns the bytes of what products for gradients of weights read: each linear layer's input and the gradient
        of its output (megalite/parallel/deferred_weight_gradients.py)."""
        model = self.model
        attention = self.hidden + self.projected + self.projection_input + self.hidden
        if not model.has_experts(self.layer):
            features = cut(model.intermediate_size, self.tp) * self.tokens * self.size
            return attention + 2 * self.hidden + (3 if model.gated_mlp else 2) * features
        rows = self.tokens * model.num_experts_per_tok
        features = cut(model.moe_intermediate_size, self.tp) * rows * self.size
        shared = 2 * self.hidden * (model.n_shared_experts > 0)
        shared += 3 * cut(model.shared_size, self.tp) * self.tokens * self.size
        return attention + 2 * rows * model.hidden_size * self.size + 3 * features + shared


def embedding_bytes(job: TrainingWorkload) -> float:
    """Returns the bytes that the embedding keeps of a micro-batch: tokens and dropout's mask."""
    tokens = job.micro_batch_tokens
    return 8.0 * tokens + (tokens * job.model.hidden_size if job.model.embedding_dropout > 0 else 0)
