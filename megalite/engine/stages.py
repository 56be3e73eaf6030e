"""The modules that an engine trains: a chunk of the layer list, and the chunks of one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.config import Config
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.float8 import use_float8
from megalite.parallel.layers import BlockInput, LayerSpec, MakeLayer, SerialModel
from megalite.parallel.loss import head_logits, head_loss

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Labels(NamedTuple):
    """The inputs of the last chunk's loss beside hidden states.

    A named tuple for the reason that `BlockInput` is one.
    """

    targets: Tensor  # [batch, seq], -100 where a token carries no loss
    weight: Tensor  # the factor on the summed loss
    add_token_losses: Callable[[Tensor], None] | None = None  # takes the loss of each token, [batch, seq] in fp32


class Chunk(nn.Module):
    """Consecutive layers of the model; where the last of them is among these, with the loss or the logits behind it.

    The loss is computed inside: ZeRO-3 holds the head's weight only while a forward is running.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], config: Config, tp: TensorParallel, make: MakeLayer, *, is_last: bool
    ) -> None:
        super().__init__()
        self.tensor_parallel, self.is_last, self._model = tp, is_last, config.model
        self._may_compile = config.performance.compile != "none"
        self.serial = SerialModel(specs, tp, make)
        if config.precision.float8 != "none":
            use_float8(self.serial, config.precision.float8)

    def forward(self, inputs: BlockInput, labels: Labels | None = None) -> Any:
        """Maps the first layer's input to the input of the chunk behind; the last chunk maps it to a scalar loss, or
        without labels to the logits."""
        outputs = self.serial(*inputs[:4])  # what is shared within another chunk stays there
        if not self.is_last:
            return outputs
        hidden, head_weight = outputs
        vocab_size, softcap = self._model.vocab_size, self._model.final_logit_softcapping
        if labels is None:
            return head_logits(hidden, head_weight, vocab_size, self.tensor_parallel, softcap)
        targets, weight, add_token_losses = labels
        token_losses = None if add_token_losses is None else targets.new_empty(targets.shape, dtype=torch.float32)
        is_compiled, tp = hidden.is_cuda and self._may_compile, self.tensor_parallel
        loss = head_loss(hidden, head_weight, targets, vocab_size, tp, softcap, is_compiled, token_losses, weight)
        if add_token_losses is not None and token_losses is not None:
            add_token_losses(token_losses)
        if loss.requires_grad:
            # A loss may be infinite though its gradient, softmax - one_hot, is not. Zero times it is NaN then, which
            # reaches the gradients of all ranks on the usual way and needs no look at the loss, which would wait for
            # the device.
            value = loss.detach()
            loss.register_hook(lambda gradient: gradient + 0.0 * value)
        return loss


class Stage(nn.Module):
    """The part of a pipelined model that one rank trains: its chunks, by their position in the model.

    Its forward runs what it is given, between DeepSpeed's hooks of a forward.
    """

    def __init__(self, chunks: Mapping[int, Chunk], tp: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tp
        self.chunks = nn.ModuleDict({str(position): chunk for position, chunk in chunks.items()})

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """Returns what `run` returns."""
        return run()
