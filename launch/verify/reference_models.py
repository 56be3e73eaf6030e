"""The models that know what is right: transformers' own class, and our serial one, on one process.

In: a `Problem` and a number format. Out: logits and hidden states, and whatever belongs to parameters (weights,
gradients, moments) as global arrays under our names.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from launch.errors import LaunchError
from launch.verify.problem import Batch, Problem
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel, make_layer, named_shards
from megalite.parallel.loss import head_logits
from models.decoder import decoder_layers
from models.families import family, hf_config

BY_LENGTH = ("dynamic", "longrope")  # rope_type whose angles depend on how long a sequence is
Keep = Callable[[str, Tensor], None]
"""Takes the name of a layer and the hidden states that it puts out."""


class Model(ABC):
    """One process's model in one number format."""

    module: nn.Module  # in evaluation mode
    drops = False  # has dropout, with the masks that layouts have

    @abstractmethod
    def __init__(self, problem: Problem, dtype: torch.dtype, device: str) -> None: ...

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """`[rows, seq, vocab]`."""

    @abstractmethod
    def watch(self, keep: Keep) -> list[RemovableHandle]:
        """From now on every forward pass hands hidden states `[rows, seq, hidden]` to `keep`."""

    @abstractmethod
    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        """`value_of` every parameter, of its shape, cut into global arrays by canonical name."""

    def routers(self) -> list[nn.Module]:
        """What picks experts: modules of hidden states `[..., hidden]` with a `weight` `[experts, hidden]`."""
        return [module for name, module in self.module.named_modules() if name.endswith(".mlp.gate")]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device


class TransformersModel(Model):
    """transformers' own class. Its modules have other names and shapes than a folder on disk, and those change from
    version to version, so weights go in and come out by its own conversion from and to the disk's layout."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: str) -> None:
        initial = {name: torch.from_numpy(value) for name, value in initial_weights(problem).items()}
        self._shapes = {name: tuple(value.shape) for name, value in initial.items()}
        model = problem.config.model
        self._layout = family(model.model_type).layout(model, self._shapes)
        # of these families transformers rotates a whole call alike, by the longest sequence in it
        self._is_one_length_a_call = model.rope_scaling is not None and model.rope_scaling.rope_type in BY_LENGTH
        self._part_of: tuple[Batch, tuple[np.ndarray, np.ndarray]] | None = None  # what is computed, and where it lies
        on_disk = {
            name: self._layout.read_hub(_reading(initial), name, _everything(tensor.shape)).clone()
            for name, tensor in self._layout.tensors.items()
        }
        module = _load(model, on_disk)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.module = module.to(device=device, dtype=dtype).eval()
        for name, buffer in buffers.items():  # rotary angles are float32 in every format, transformers' and ours
            parent, leaf = name.rsplit(".", 1)
            setattr(module.get_submodule(parent), leaf, buffer.to(device))

    def logits(self, batch: Batch) -> Tensor:
        is_double = next(self.module.parameters()).dtype == torch.float64
        with _ReallyFloat64(self.module) if is_double else contextlib.nullcontext():
            if batch.positions is not None and self._is_one_length_a_call:
                return self._logits_by_length(batch)
            # of positions that start again, without a mask, transformers makes that of each layer, its window included
            return self._logits(batch.tokens, batch.positions)

    def _logits(self, tokens: np.ndarray, positions: np.ndarray | None) -> Tensor:
        position_ids = None if positions is None else torch.from_numpy(positions).to(self.device)
        return self.module(torch.from_numpy(tokens).to(self.device), position_ids=position_ids, use_cache=False).logits

    def _logits_by_length(self, batch: Batch) -> Tensor:
        """Documents of one length at a time, each a row of its own."""
        logits = torch.zeros(())
        for rows, columns in _documents_by_length(batch):
            self._part_of = batch, (rows, columns)
            part = self._logits(batch.tokens[rows, columns], None)
            if not logits.ndim:
                logits = part.new_zeros((*batch.tokens.shape, part.shape[-1]))
            logits[rows, columns] = part
        self._part_of = None
        return logits

    def watch(self, keep: Keep) -> list[RemovableHandle]:
        layers = list(dict.fromkeys(map(_layer_of, self._shapes)))
        blocks = [name for name in layers if _is_block(name)]
        # a family may scale embeddings or add positions outside of any module: what the first block reads has it all
        embedding = layers[layers.index(blocks[0]) - 1]

        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            keep_whole(embedding, inputs[0].detach())

        wholes: dict[str, Tensor] = {}

        def keep_whole(name: str, hidden: Tensor) -> None:
            if self._part_of is not None:
                batch, where = self._part_of
                whole = wholes.setdefault(name, hidden.new_zeros((*batch.tokens.shape, hidden.shape[-1])))
                whole[where] = hidden
                hidden = whole
            keep(name, hidden)

        handles = [self._part(blocks[0]).register_forward_pre_hook(before)]
        handles += [self._part(name).register_forward_hook(_hook(name, keep_whole)) for name in (*blocks, "model.norm")]
        return handles

    def _part(self, layer: str) -> nn.Module:
        """The module whose tensors on disk are this layer's."""
        owned = [name for name in self._shapes if _layer_of(name) == layer]
        on_disk = [hub.split(".")[:-1] for name in owned for hub in self._layout.hub_names(name)]
        common = takewhile(lambda words: len(set(words)) == 1, zip(*on_disk, strict=False))
        return self.module.get_submodule(".".join(words[0] for words in common))

    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        from transformers.core_model_loading import revert_weight_conversion

        values = {name: value_of(parameter) for name, parameter in self.module.named_parameters()}
        on_disk = revert_weight_conversion(self.module, values)  # what save_pretrained does
        assert on_disk.keys() == self._layout.tensors.keys(), on_disk.keys() ^ self._layout.tensors.keys()
        read = _reading(on_disk)
        blocks = ((name, self._layout.read_own(read, name, _everything(shape))) for name, shape in self._shapes.items())
        return {name: as_numpy(block) for name, block in blocks}


def _load(model: ModelConfig, on_disk: dict[str, Tensor]) -> Any:
    """transformers' model with these weights, in float32. Raises LaunchError where it does not take them."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    values = hf_config(model, "fp32")
    try:
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        module, report = getattr(transformers, family(model.model_type).architecture).from_pretrained(
            None,
            config=config,
            state_dict=on_disk,
            dtype=torch.float32,
            experts_implementation="eager",  # as it is written out; what is fused changes from version to version
            output_loading_info=True,
        )
    except Exception as error:  # whatever it raises is about the options it was given
        reason = " ".join(str(error).split())
        raise LaunchError(f"transformers does not build this model, {reason}: try --reference self") from None
    wrong = sorted(set(report["missing_keys"]) | set(report["unexpected_keys"]))
    if wrong:  # it would draw random numbers
        raise LaunchError(f"transformers takes other weights than ours, of {', '.join(wrong)}: try --reference self")
    return module


def _documents_by_length(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and columns `[documents, length]` of the tokens of all documents of one length, for each length."""
    assert batch.positions is not None
    seq = batch.positions.shape[1]
    rows, starts = np.nonzero(batch.positions == 0)
    ends = np.append(starts[1:], 0)
    lengths = np.where(ends > starts, ends, seq) - starts  # the next document starts a row of its own
    for length in np.unique(lengths):
        is_so_long = lengths == length
        columns = starts[is_so_long, None] + np.arange(length)
        yield np.repeat(rows[is_so_long, None], length, axis=1), columns


def _reading(tensors: Mapping[str, Tensor]) -> Callable[[str, tuple[slice, ...]], Tensor]:
    return lambda name, where: tensors[name][where]


def _everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`; `model.norm.weight` -> `model.norm`."""
    words = name.split(".")
    return ".".join(words[:3]) if words[1] == "layers" else ".".join(words[:-1])


def _is_block(layer: str) -> bool:
    return layer.startswith("model.layers.")


class SerialReference(Model):
    """Our own layers in order: for what transformers does not compute, such as our dropout."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: str) -> None:
        model = problem.config.model
        self._vocabulary, self._softcap, self.drops = model.vocab_size, model.final_logit_softcapping, model.has_dropout
        self.module = _serial(problem).to(device=device, dtype=dtype).eval()

    def logits(self, batch: Batch) -> Tensor:
        riders = [batch.positions] if batch.positions is not None else []
        riders += [batch.samples] if self.drops else []
        tokens, *others = (torch.from_numpy(array).to(self.device) for array in (batch.tokens, *riders))
        hidden, head_weight = self.module((tokens, *others) if others else tokens)
        return head_logits(hidden, head_weight, self._vocabulary, TensorParallel(), self._softcap)

    def watch(self, keep: Keep) -> list[RemovableHandle]:
        layers = ((str(module.layer_name), module) for module in self.module.modules() if hasattr(module, "layer_name"))
        return [module.register_forward_hook(_hook(name, keep)) for name, module in layers if name != "lm_head"]

    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        return {
            piece.name: as_numpy(value_of(parameter)[piece.target])
            for _, parameter in named_shards(self.module)
            for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
        }


def _hook(name: str, keep: Keep) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        keep(name, (output[0] if isinstance(output, tuple) else output).detach())

    return hook


class _ReallyFloat64(TorchFunctionMode):
    """transformers casts to float32 where half precision would lose too much (norms, softmax); here to float64.

    Rotary angles stay float32: both sides compute them so, whatever the format of the weights.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._paused = False
        rotary = [part for part in module.modules() if _has_angles(part)]
        self._hooks = [part.register_forward_pre_hook(lambda *_: self._pause(True)) for part in rotary]
        self._hooks += [part.register_forward_hook(lambda *_: self._pause(False)) for part in rotary]

    def _pause(self, paused: bool) -> None:
        self._paused = paused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_wider, args), **{name: _wider(value) for name, value in kwargs.items()})

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)


def _has_angles(module: nn.Module) -> bool:
    """Rotary embedding; some families keep the angles of each kind of layer in it."""
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _serial(problem: Problem) -> SerialModel:
    config = problem.config
    spread = config.model.initializer_range

    def make(spec: Any, tp: TensorParallel) -> nn.Module:
        return make_layer(spec, tp, seed=config.training.seed, initializer_range=spread)

    module = SerialModel(decoder_layers(config.model), TensorParallel(), make)
    with torch.no_grad():
        for _, parameter in named_shards(module):
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                value = parameter[piece.target].numpy()
                start = problem.initial_value(piece.name, value, piece.source, piece.shape)
                parameter[piece.target] = torch.from_numpy(start)
    return module


def initial_weights(problem: Problem) -> dict[str, np.ndarray]:
    """The global weights that every layout and reference starts from."""
    return SerialReference(problem, torch.float32, "cpu").named(lambda parameter: parameter.detach())


def as_numpy(value: Tensor) -> np.ndarray:
    """A copy of it in float32, or float64 where it is that."""
    value = value.detach().cpu()
    return (value if value.dtype == torch.float64 else value.float()).numpy().copy()
