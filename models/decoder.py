"""One configurable decoder, as a list of layers: embedding, learned positions if any, blocks, final norm, output head.

In: token ids `[batch, seq]`, with positions where documents are masked and sample ids where dropout is on
(`BlockInput`). Between layers: the same with hidden states `[batch, seq, hidden]` (`[batch, seq/tp, hidden]` under
sequence parallelism) in place of the ids; only hidden states from the last block on.
Out: hidden states and the head's local weight, which `megalite.parallel.loss` turns into a loss without ever holding
all logits. The math follows transformers' models. This module knows no ranks, files or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import Config, ModelConfig
from megalite.parallel.activation_offload import ActivationOffload
from megalite.parallel.adapters import with_adapters
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.context import own_places, own_spans
from megalite.parallel.dropout import Dropout
from megalite.parallel.layers import BlockInput, CompilableBlock, LayerSpec, Recompute, recomputed
from megalite.parallel.linear import VocabParallelEmbedding, replicated_weight, sharded_parameter
from megalite.parallel.mesh import block_cost, head_cost
from megalite.parallel.norm import NORMS
from megalite.parallel.shard import Shard
from models.attention import Attention
from models.attention_inputs import AttentionChoice, AttentionInputs
from models.experts import SparseMLP
from models.feed_forward import MLP
from models.latent_attention import LatentAttention

HeadOutput = tuple[Tensor, Tensor]  # hidden states, the head's local weight [vocab/tp, hidden]


def decoder_layers(
    model: ModelConfig,
    recompute: Recompute | Sequence[Recompute] = "none",
    *,
    offload_activations: bool = False,
    attention: AttentionChoice = "auto",
) -> list[LayerSpec]:
    """Returns the layers of `model` in order: the single definition that every engine builds from.

    `recompute` is that of all blocks, or of each.
    """
    modes = [recompute] * model.num_hidden_layers if isinstance(recompute, str) else recompute
    offload = ActivationOffload() if offload_activations else None
    tie = "model.embed_tokens" if model.tie_word_embeddings else None
    embedding = LayerSpec("model.embed_tokens", partial(TokenEmbedding, model), cost=0.0, tied_to=tie)
    # a layer of its own, because a tied embedding also stands on the last stage
    positions = LayerSpec("model.embed_positions", partial(PositionEmbedding, model), cost=0.0)
    blocks = [
        LayerSpec(
            name=f"model.layers.{index}",
            build=partial(DecoderBlock, model, mode, index, offload=offload, attention=attention),
            cost=block_cost(model, index),
            is_block=True,
        )
        for index, mode in zip(range(model.num_hidden_layers), modes, strict=True)
    ]
    norm = LayerSpec("model.norm", partial(_norm, model), cost=0.0)
    if model.tie_word_embeddings:
        head = LayerSpec(embedding.name, embedding.build, head_cost(model), tied_to=tie, forward=_tied_head)
    else:
        head = LayerSpec("lm_head", lambda tp: OutputHead(model.vocab_size, model.hidden_size, tp), head_cost(model))
    return [embedding, *([positions] if model.position_embedding == "learned" else []), *blocks, norm, head]


def layers_of(config: Config, recompute: Sequence[Recompute]) -> list[LayerSpec]:
    """Returns the layers of a run's model with its offloading, attention and adapters; `recompute` is that of each
    block."""
    layers = decoder_layers(
        config.model,
        recompute,
        offload_activations=config.offload.activations == "cpu",
        attention=config.performance.attention,
    )
    return with_adapters(layers, config.adapter)


def _norm(model: ModelConfig, tp: TensorParallel) -> nn.Module:
    return NORMS[model.normalization](model.hidden_size, model.rms_norm_eps, tp)


def _tied_head(embedding: nn.Module, hidden: Tensor) -> HeadOutput:
    assert isinstance(embedding.weight, Tensor)
    return hidden, embedding.weight


class TokenEmbedding(VocabParallelEmbedding):
    """The first layer: embeds the tokens."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(model.vocab_size, model.hidden_size, tp)
        self.scale = model.hidden_size**0.5 if model.scale_embeddings else None
        # dropout applies to the sum of all embeddings: after the positions, where they are learned
        self.dropout = Dropout(0.0 if model.position_embedding == "learned" else model.embedding_dropout, tp)

    def forward(self, x: BlockInput) -> BlockInput:  # type: ignore[override]
        """Token ids `[batch, seq]` -> `[batch, seq(/tp), hidden]`."""
        hidden = super().forward(x.hidden)
        if self.scale is not None:  # rounded to the compute dtype, as in Gemma's training
            hidden = hidden.mul_(torch.tensor(self.scale, dtype=hidden.dtype).item())
        return x._replace(hidden=self.dropout(hidden, x.sample_ids))


class PositionEmbedding(nn.Module):
    """Adds the learned vector of each token's position (GPT-2)."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        shape = (model.max_position_embeddings, model.hidden_size)
        self.weight = replicated_weight(shape, tp, "normal")
        self.dropout = Dropout(model.embedding_dropout, tp)
        self.offset = 0  # position of the first token if the input has no positions; generation continues a cache

    def forward(self, x: BlockInput) -> BlockInput:
        """`[batch, seq(/tp), hidden]` -> the same."""
        rows, known = x.hidden.shape[1], len(self.weight)
        length = rows * self.tp.sequence_parts
        if x.positions is not None:
            vectors = F.embedding(x.positions[:, own_places(rows, self.tp, x.hidden.device)], self.weight)
        else:
            stop = self.offset + length
            assert stop <= known, f"a sequence of {stop} tokens, but there are {known} learned positions"
            whole = self.weight[self.offset : stop]
            spans = [whole[at.start : at.stop] for at in own_spans(length, self.tp.context)]
            vectors = spans[0] if len(spans) == 1 else torch.cat(spans)
            if self.tp.sequence_is_cut:
                vectors = vectors[self.tp.rank * rows :][:rows]
        return x._replace(hidden=self.dropout(x.hidden + vectors, x.sample_ids))


class OutputHead(nn.Module):
    """The untied output head: holds its rows of the vocabulary; the GEMM happens inside the loss."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = sharded_parameter(Shard((vocab_size, hidden_size), 0, (("", vocab_size),), tp.size, tp.rank))

    def forward(self, hidden: Tensor) -> HeadOutput:
        return hidden, self.weight


class BlockNorms(NamedTuple):
    """Names of the norms of a block; None: nothing is normalized at that place."""

    attention_input: str | None
    attention_output: str | None
    mlp_input: str | None
    mlp_output: str | None


# names as in transformers' Llama, OLMo-2 and Gemma 2
BLOCK_NORMS = {
    "pre": BlockNorms("input_layernorm", None, "post_attention_layernorm", None),
    "post": BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "pre_and_post": BlockNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}


class DecoderBlock(CompilableBlock):
    """Attention and feed-forward part, in sequence or in parallel, each added to the residual stream."""

    def __init__(
        self,
        model: ModelConfig,
        recompute: Recompute,
        layer: int,
        tp: TensorParallel,
        offload: ActivationOffload | None = None,
        attention: AttentionChoice = "auto",
    ) -> None:
        super().__init__()
        self.recompute, self.offload, self.is_last = recompute, offload, layer == model.num_hidden_layers - 1
        self.is_parallel, self.norms = model.use_parallel_residual, BLOCK_NORMS[model.norm_placement]
        # submodules in order of computation, which is also that of the parameters
        self._add_norm(self.norms.attention_input, model, tp)
        self.self_attn = (LatentAttention if model.kv_lora_rank else Attention)(model, layer, tp, recompute, attention)
        self._add_norm(self.norms.attention_output, model, tp)
        self._add_norm(self.norms.mlp_input, model, tp)
        self.mlp = SparseMLP(model, tp) if model.has_experts(layer) else MLP(model, tp, recompute)
        self._add_norm(self.norms.mlp_output, model, tp)
        self.attention_output_dropout = Dropout(model.residual_dropout, tp)
        self.mlp_output_dropout = Dropout(model.residual_dropout, tp)

    def _add_norm(self, name: str | None, model: ModelConfig, tp: TensorParallel) -> None:
        if name is not None:
            self.add_module(name, _norm(model, tp))

    def forward(self, x: BlockInput) -> BlockInput | Tensor:
        """`[batch, seq(/tp), hidden]` -> the same; the last block returns the hidden states alone."""
        arguments = x.hidden, self.self_attn.shared_inputs(x), x.sample_ids
        if self.offload is None or not torch.is_grad_enabled():
            hidden = self._block(*arguments)
        else:
            hidden = self.offload(self, self._block, *arguments)
        return hidden if self.is_last else x._replace(hidden=hidden)

    def _block(self, hidden: Tensor, inputs: AttentionInputs, sample_ids: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.compute(hidden, inputs, sample_ids)
        compute = self.compute if self.compiled is None else partial(self.compiled, self)
        if self.recompute == "full":
            return recomputed(compute, hidden, inputs, sample_ids)
        return compute(hidden, inputs, sample_ids)

    def compute(self, hidden: Tensor, inputs: AttentionInputs, sample_ids: Tensor | None) -> Tensor:
        """Computes the block, `[batch, seq(/tp), hidden]` -> the same."""
        # what norms put out: projections can compute it again from their input, as a compiler does by itself
        is_kept = self.recompute != "selective" or torch.compiler.is_compiling()
        attended = self.self_attn(self._normed(self.norms.attention_input, hidden, is_kept), inputs, sample_ids)
        attended = self.attention_output_dropout(self._normed(self.norms.attention_output, attended), sample_ids)
        # residuals are added in place, to results of GEMMs and norms that nothing else reads
        norm = getattr(self, self.norms.mlp_input or "", None)
        if is_kept and norm is not None and norm.run is not partial and not self.is_parallel:
            hidden, normed = norm(attended, hidden)
        else:
            hidden = hidden if self.is_parallel else attended.add_(hidden)
            normed = self._normed(self.norms.mlp_input, hidden, is_kept or not isinstance(self.mlp, MLP))
        fed_forward = self.mlp_output_dropout(self._normed(self.norms.mlp_output, self.mlp(normed)), sample_ids)
        return fed_forward.add_(attended).add_(hidden) if self.is_parallel else fed_forward.add_(hidden)

    def _normed(self, norm: str | None, x: Tensor, is_kept: bool = True) -> Any:
        return x if norm is None else getattr(self, norm)(x, is_kept=is_kept)
