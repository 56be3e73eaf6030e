"""Reference models on one process: transformers' own class, and our serial model.

In: a `ParityProblem` and a number format. Out: logits and hidden states, and the values of parameters (weights,
gradients, moments) as global arrays under our names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from launch.errors import LaunchError
from launch.huggingface.layer_outputs import Keep, watch_layers
from launch.huggingface.transformers_model import from_pretrained
from launch.parity.problem import Batch, ParityProblem
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel, make_layer, named_shards
from megalite.parallel.loss import head_logits
from models.decoder import decoder_layers
from models.families import family, hf_config

BY_LENGTH = ("dynamic", "longrope")  # rope_type whose angles depend on the length of the sequence


class Model(ABC):
    """A model on one process in one number format."""

    model: ModelConfig
    module: nn.Module  # in evaluation mode
    drops = False  # has dropout, with the same masks as all layouts

    @abstractmethod
    def __init__(self, problem: ParityProblem, dtype: torch.dtype, device: str) -> None: ...

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """Returns `[rows, seq, vocab]`."""

    @abstractmethod
    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        """Returns `value_of` every parameter (of its shape) as global arrays by canonical name."""

    def watch(self, keep: Keep) -> AbstractContextManager[None]:
        """Passes hidden states `[rows, seq, hidden]` of every forward pass inside the block to `keep`."""
        return watch_layers(self.module, self.model, keep)

    def routers(self) -> list[nn.Module]:
        """Returns the routers of experts: modules of `[..., hidden]` with a `weight` `[experts, hidden]`."""
        return [module for name, module in self.module.named_modules() if name.endswith(".mlp.gate")]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device


class TransformersModel(Model):
    """transformers' own class.

    Its modules have other names and shapes than a folder on disk, and these change from version to version, so weights
    enter and leave by transformers' own conversion from and to the layout on disk.
    """

    def __init__(self, problem: ParityProblem, dtype: torch.dtype, device: str) -> None:
        initial = {name: torch.from_numpy(value) for name, value in initial_weights(problem).items()}
        self._shapes = {name: tuple(value.shape) for name, value in initial.items()}
        self.model = model = problem.config.model
        self._layout = family(model.model_type).layout(model, self._shapes)
        # for these rope types transformers rotates all rows of a call by the longest sequence among them
        self._is_one_length_a_call = model.rope_scaling is not None and model.rope_scaling.rope_type in BY_LENGTH
        self._part_of: tuple[Batch, tuple[np.ndarray, np.ndarray]] | None = None  # part being computed: rows, columns
        on_disk = {
            name: self._layout.read_hub(_reading(initial), name, _everything(tensor.shape)).clone()
            for name, tensor in self._layout.tensors.items()
        }
        module = _load(model, on_disk)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.module = module.to(device=device, dtype=dtype)
        for name, buffer in buffers.items():  # rotary angles are float32 in every format, transformers' and ours
            parent, leaf = name.rsplit(".", 1)
            setattr(module.get_submodule(parent), leaf, buffer.to(device))

    def logits(self, batch: Batch) -> Tensor:
        is_double = next(self.module.parameters()).dtype == torch.float64
        with _ReallyFloat64(self.module) if is_double else nullcontext():
            if batch.positions is None or not self._is_one_length_a_call:
                # from positions that restart, without a mask, transformers derives the mask of each layer and window
                return self._logits(batch.tokens, batch.positions)
            logits: Tensor | None = None
            for rows, columns in _documents_by_length(batch):  # each document is a row of its own
                self._part_of = batch, (rows, columns)
                part = self._logits(batch.tokens[rows, columns], None)
                logits = part.new_zeros((*batch.tokens.shape, part.shape[-1])) if logits is None else logits
                logits[rows, columns] = part
            self._part_of = None
            assert logits is not None, "a batch without documents"
            return logits

    def _logits(self, tokens: np.ndarray, positions: np.ndarray | None) -> Tensor:
        position_ids = None if positions is None else torch.from_numpy(positions).to(self.device)
        return self.module(torch.from_numpy(tokens).to(self.device), position_ids=position_ids, use_cache=False).logits

    @contextmanager
    def watch(self, keep: Keep) -> Iterator[None]:
        """Passes hidden states `[rows, seq, hidden]` to `keep`, filled in part by part if documents run separately."""
        wholes: dict[str, Tensor] = {}

        def keep_whole(name: str, hidden: Tensor) -> None:
            if self._part_of is not None:
                batch, where = self._part_of
                whole = wholes.setdefault(name, hidden.new_zeros((*batch.tokens.shape, hidden.shape[-1])))
                whole[where] = hidden
                hidden = whole
            keep(name, hidden)

        with watch_layers(self.module, self.model, keep_whole):
            yield

    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        from transformers.core_model_loading import revert_weight_conversion

        values = {name: value_of(parameter) for name, parameter in self.module.named_parameters()}
        on_disk = revert_weight_conversion(self.module, values)  # as save_pretrained does
        assert on_disk.keys() == self._layout.tensors.keys(), on_disk.keys() ^ self._layout.tensors.keys()
        read = _reading(on_disk)
        blocks = ((name, self._layout.read_own(read, name, _everything(shape))) for name, shape in self._shapes.items())
        return {name: as_numpy(block) for name, block in blocks}


def _load(model: ModelConfig, on_disk: dict[str, Tensor]) -> Any:
    """Builds transformers' model with these weights in float32. Raises LaunchError if it does not accept them."""
    import transformers

    values = hf_config(model, "fp32")
    try:
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        kind = getattr(transformers, family(model.model_type).architecture)
        module, report = from_pretrained(kind, None, config=config, state_dict=on_disk, dtype=torch.float32)
    except Exception as error:  # whatever it raises is about the options it was given
        reason = " ".join(str(error).split())
        raise LaunchError(f"transformers does not build this model, {reason}: try --reference self") from None
    wrong = sorted(set(report["missing_keys"]) | set(report["unexpected_keys"]))
    if wrong:  # transformers would initialize missing weights at random
        raise LaunchError(f"transformers takes other weights than ours, of {', '.join(wrong)}: try --reference self")
    return module


def _documents_by_length(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, for each length, rows and columns `[documents, length]` of the tokens of all documents of this length."""
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


class SerialReference(Model):
    """Our own layers in order, for what transformers does not compute, such as our dropout."""

    def __init__(self, problem: ParityProblem, dtype: torch.dtype, device: str) -> None:
        config = problem.config
        self.model, self.drops = config.model, config.model.has_dropout
        make = partial(make_layer, seed=config.training.seed, initializer_range=self.model.initializer_range)
        module = SerialModel(decoder_layers(self.model), TensorParallel(), make)
        with torch.no_grad():
            for _, parameter in named_shards(module):
                for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                    value = parameter[piece.target].numpy()
                    start = problem.initial_value(piece.name, value, piece.source, piece.shape)
                    parameter[piece.target] = torch.from_numpy(start)
        self.module = module.to(device=device, dtype=dtype).eval()

    def logits(self, batch: Batch) -> Tensor:
        arrays = batch.tokens, batch.positions, batch.samples if self.drops else None
        inputs = (None if array is None else torch.from_numpy(array).to(self.device) for array in arrays)
        hidden, weight = self.module(*inputs)
        return head_logits(hidden, weight, self.model.vocab_size, TensorParallel(), self.model.final_logit_softcapping)

    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        return {
            piece.name: as_numpy(value_of(parameter)[piece.target])
            for _, parameter in named_shards(self.module)
            for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
        }


class _ReallyFloat64(TorchFunctionMode):
    """Replaces transformers' casts to float32, made where half precision loses too much (norms, softmax), by float64.

    Rotary angles stay float32: both sides compute them so, whatever the format of the weights.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._paused = False
        # rotary embeddings; in some families with the angles of each kind of layer
        names = ((part, name) for part in module.modules() for name, _ in part.named_buffers(recurse=False))
        rotary = dict.fromkeys(part for part, name in names if name.endswith("inv_freq"))
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


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def initial_weights(problem: ParityProblem) -> dict[str, np.ndarray]:
    """Returns the global weights that every layout and reference starts from."""
    return SerialReference(problem, torch.float32, "cpu").named(lambda parameter: parameter.detach())


def as_numpy(value: Tensor) -> np.ndarray:
    """Copies a tensor to float32, or float64 if it is that."""
    value = value.detach().cpu()
    return (value if value.dtype == torch.float64 else value.float()).numpy().copy()
