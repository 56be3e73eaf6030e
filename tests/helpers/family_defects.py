"""Defects to plant in a rank, in what the common families add to the decoder: norms of heads, experts, windows, ropes.

As `defects.py`: they patch the modules of a forked process, which ends with the layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import megalite.engine.stages as stages
import megalite.parallel.norm as norm
import megalite.parallel.replicated_linear as replicated_linear
import models.attention as attention
import models.attention_inputs as attention_inputs
import models.attention_masks as attention_masks
import models.decoder as decoder
import models.experts as experts
import models.latent_attention as latent_attention
import models.rope as rope
from megalite.parallel.collectives import TensorParallel


def norm_of_heads_keeps_the_gradient_of_its_own() -> None:
    """Each rank's gradient is of its own heads only."""
    kinds = norm.NORMS
    attention.norm_of_each_head = lambda model, tp: kinds[model.normalization](model.head_dim, model.rms_norm_eps, tp)


def norm_over_all_heads_sees_its_own() -> None:
    forward = norm.FullWidthRMSNorm.forward

    def local(self: Any, x: Tensor) -> Tensor:
        self.tp, self.features = TensorParallel(), x.shape[-1]
        return forward(self, x)

    norm.FullWidthRMSNorm.forward = local  # type: ignore[method-assign]


def router_keeps_the_gradient_of_its_own_part() -> None:
    experts.parameter_in_parallel_region = lambda parameter, tp: parameter


def router_counts_each_expert_fully() -> None:
    """Probabilities that do not sum to one."""
    forward = experts.Router.forward

    def unnormalized(self: Any, x: Tensor, bias: Tensor | None = None) -> experts.ExpertChoice:
        self.renormalizes = False
        return forward(self, x, bias)

    experts.Router.forward = unnormalized  # type: ignore[method-assign]


def router_sees_all_groups() -> None:
    experts.GroupChoice.within_best = lambda self, worth: worth  # type: ignore[method-assign]


def shared_key_keeps_the_gradient_of_its_own_heads() -> None:
    latent_attention.enter_parallel_region = lambda x, tp: x


def latents_keep_the_gradient_of_their_slice() -> None:
    replicated_weight = replicated_linear.replicated_weight

    def unsummed(*arguments: Any) -> Any:
        parameter = replicated_weight(*arguments)
        parameter.is_summed_at_step = False  # type: ignore[attr-defined]
        return parameter

    replicated_linear.replicated_weight = unsummed


def scores_of_latents_are_not_scaled() -> None:
    latent_attention.score_factor = lambda rope: 1.0


def halves_are_rotated_for_neighbours() -> None:
    """As other families have their pairs."""

    def rotated(x: Tensor, inputs: Any) -> Tensor:
        return attention._rotated_plainly(x, inputs.cos, inputs.sin)

    latent_attention._rotated_neighbours = rotated


def window_is_one_token_longer() -> None:
    """The window without the token itself, as some count it."""
    document_mask, causal_mask = attention_masks.document_mask, attention_masks.causal_mask

    def longer(window: int | None) -> int | None:
        return None if window is None else window + 1

    attention_inputs.document_mask = lambda positions, window, *rest: document_mask(positions, longer(window), *rest)
    attention_inputs.causal_mask = lambda queries, keys, window, device: causal_mask(
        queries, keys, longer(window), device
    )


def blocks_are_counted_from_the_first_of_their_stage() -> None:
    """A pattern of layers that starts again on every stage."""
    from launch.parity import rank

    layers, create, built = rank.layers_of, decoder.DecoderBlock.__init__, [0]

    def layers_of(*arguments: Any) -> Any:
        built[0] = 0
        return layers(*arguments)

    def init(self: Any, model: Any, recompute: Any, layer: int, tp: TensorParallel, **options: Any) -> None:
        create(self, model, recompute, built[0], tp, **options)
        self.is_last = layer == model.num_hidden_layers - 1
        built[0] += 1

    rank.layers_of = layers_of
    decoder.DecoderBlock.__init__ = init  # type: ignore[method-assign]


def rope_is_not_scaled() -> None:
    of_layer = attention.rope_of_layer

    def unscaled(*arguments: Any) -> Any:
        found = of_layer(*arguments)
        return None if found is None else dataclasses.replace(found, scaling=None)

    attention.rope_of_layer = unscaled


def rope_is_scaled_by_the_length_of_the_pack() -> None:
    """A short document in a long row is rotated as a long one."""
    rope.document_lengths = lambda positions: torch.full_like(positions, positions.shape[1])


def all_layers_have_the_global_base() -> None:
    of_layer = attention.rope_of_layer
    attention.rope_of_layer = lambda model, layer: of_layer(
        model.model_copy(update={"rope_local_base_freq": None}), layer
    )


def every_layer_is_rotated() -> None:
    of_layer = attention.rope_of_layer
    attention.rope_of_layer = lambda model, layer: of_layer(model.model_copy(update={"layers_without_rope": ()}), layer)


def learned_positions_restart_on_each_slice() -> None:
    forward = decoder.PositionEmbedding.forward

    def from_zero(self: Any, payload: Any) -> Any:
        mine = self.tp
        self.tp = dataclasses.replace(mine, rank=0)
        try:
            return forward(self, payload)
        finally:
            self.tp = mine

    decoder.PositionEmbedding.forward = from_zero  # type: ignore[method-assign]


def gradient_of_learned_positions_is_of_a_slice() -> None:
    create = decoder.replicated_weight

    def weight(*arguments: Any) -> Any:
        parameter = create(*arguments)
        parameter.is_summed_at_step = False  # type: ignore[attr-defined]
        return parameter

    decoder.replicated_weight = weight


def norm_is_not_centered() -> None:
    """Gemma's weights taken for factors, though 1 is to be added."""

    def normalize(eps: float, x: Tensor, weight: Tensor) -> Tensor:
        return norm._RMSNorm.apply(x, weight, eps, 0.0, x.shape[-1])

    norm.ZeroCenteredRMSNorm.normalize = staticmethod(normalize)  # type: ignore[method-assign]


def loss_of_logits_without_their_cap() -> None:
    head_loss = stages.head_loss
    stages.head_loss = lambda *arguments: head_loss(*arguments[:5], None, *arguments[6:])


def scores_are_not_capped() -> None:
    create = attention.Attention.__init__

    def init(self: Any, *arguments: Any) -> None:
        create(self, *arguments)
        self.softcap = None

    attention.Attention.__init__ = init  # type: ignore[method-assign]


def feed_forward_reads_what_attention_added() -> None:
    """A parallel residual computed one after the other."""
    create = decoder.DecoderBlock.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        self.is_parallel = False

    decoder.DecoderBlock.__init__ = init  # type: ignore[method-assign]
