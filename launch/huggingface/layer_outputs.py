"""Outputs of all layers of a decoder, ours or transformers', under the names of our layers.

transformers may scale embeddings or add positions outside of any module, so the output of its embedding is observed as
the input of its first block, and that of its last norm as the input of its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.layers import SerialModel
from models.decoder import decoder_layers

Keep = Callable[[str, Tensor], object]
"""Receives the name of a layer and its output `[batch, seq, hidden]`, detached."""


@contextmanager
def watch_layers(module: nn.Module, model: ModelConfig, keep: Keep) -> Iterator[None]:
    """Calls `keep` with the output of every layer but the head in each forward pass of `module` inside the block.

    module: a `SerialModel` or a causal language model of transformers, of the sizes of `model`. Of transformers' model
    the first name is that of our last layer before the blocks.
    """
    specs = decoder_layers(model)[:-1]
    blocks = [spec for spec in specs if spec.is_block]
    if isinstance(module, SerialModel):
        handles = [
            module.layers[spec.module_key].register_forward_hook(partial(_keep_output, keep, spec.name))
            for spec in specs
        ]
    else:
        lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
        their_blocks = next(part for part in lists if len(part) == len(blocks))
        embedding, norm = specs[specs.index(blocks[0]) - 1], specs[-1]
        head: nn.Module = module.get_output_embeddings()  # type: ignore[operator]
        handles = [
            their_blocks[0].register_forward_pre_hook(partial(_keep_input, keep, embedding.name), with_kwargs=True),
            *(
                block.register_forward_hook(partial(_keep_output, keep, spec.name))
                for spec, block in zip(blocks, their_blocks, strict=True)
            ),
            head.register_forward_pre_hook(partial(_keep_input, keep, norm.name), with_kwargs=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_input(keep: Keep, name: str, _: nn.Module, inputs: Any, named_inputs: Any) -> None:
    keep(name, (inputs[0] if inputs else named_inputs["hidden_states"]).detach())


def _keep_output(keep: Keep, name: str, _: nn.Module, inputs: Any, output: Any) -> None:
    keep(name, (output[0] if isinstance(output, tuple) else output).detach())
