"""Reference models on one process: transformers' own class and our serial model, with the same interface.

In: initial weights, or a Hugging Face folder, and a number format. Out: logits and the outputs of all layers, and the
values of parameters (weights, gradients, moments) as global arrays under our names. Letters of shapes: B rows, S tokens
of a row, K of them whose outputs are wanted.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from launch.errors import LaunchError
from megalite.checkpoint.huggingface.folder import INDEX, WEIGHTS
from megalite.checkpoint.huggingface.json_files import ADAPTER
from megalite.config import Config, ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.expert_balance import BIAS
from megalite.parallel.float8 import Recipe, use_float8
from megalite.parallel.layers import SerialModel, make_layer, named_shards
from megalite.parallel.loss import head_logits
from models.decoder import decoder_layers
from models.families import family, hf_config
from models.hub.tensor_layout import HubLayout

BY_LENGTH = ("dynamic", "longrope")  # rope_type whose angles depend on the length of the sequence
HEAD = "lm_head"  # its output is the logits


class Rows(NamedTuple):
    """Rows of tokens, in a form that every model takes."""

    tokens: Tensor  # [B, S]
    positions: Tensor | None = None  # [B, S], 0 where a document, or padding before one, begins
    samples: Tensor | None = None  # [B], positions of the rows in the data, for dropout
    real: Tensor | None = None  # bool [B, S]: tokens that are not padding; None: all


class InitialModel(Protocol):
    """A config and the weights that its model starts from."""

    @property
    def config(self) -> Config: ...

    def initial_value(self, name: str, value: np.ndarray, where: tuple[slice, ...], shape: tuple[int, ...]) -> Any:
        """Returns the initial value of a block of the weight `name`, given that of an ordinary run, `value`."""


class Model(ABC):
    """A model on one process in one number format."""

    def __init__(self, model: ModelConfig, module: nn.Module) -> None:
        """module: in evaluation mode."""
        self.model = model
        self.module: Any = module

    @classmethod
    @abstractmethod
    def of(cls, start: InitialModel, dtype: torch.dtype, device: str) -> Self:
        """Builds a model with its initial weights. Raises LaunchError if that is impossible."""

    @abstractmethod
    def multiply_in_float8(self, recipe: Recipe) -> None:
        """Converts the projections of attention and of dense feed-forward parts."""

    @abstractmethod
    def outputs(self, rows: Rows, columns: Tensor | None = None, *, layers: bool = False) -> dict[str, Tensor]:
        """Returns the logits `[B, K, vocab]` under `HEAD`, after the output `[B, K, hidden]` of every other layer by
        name if `layers`.

        columns: the tokens of each row whose outputs are wanted, `[K]`; all by default.
        """

    @abstractmethod
    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        """Returns `value_of` every parameter (of its shape) as global arrays by canonical name."""

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

    _shapes: Mapping[str, tuple[int, ...]]  # our weights by canonical name; set by `of`
    _layout: HubLayout

    def __init__(self, model: ModelConfig, module: nn.Module, *, runs_documents_alone: bool = False) -> None:
        super().__init__(model, module)
        # for some rope types transformers rotates all rows of a call by the longest sequence among them
        depends_on_length = model.rope_scaling is not None and model.rope_scaling.rope_type in BY_LENGTH
        self.runs_documents_alone = runs_documents_alone or depends_on_length

    @classmethod
    def of(cls, start: InitialModel, dtype: torch.dtype, device: str) -> Self:
        import transformers

        model, initial = start.config.model, initial_weights(start)
        described, shapes = family(model.model_type), {name: value.shape for name, value in initial.items()}
        layout, read = described.layout(model, shapes), _reading({k: torch.from_numpy(v) for k, v in initial.items()})
        on_disk = {
            name: layout.read_hub(read, name, _everything(tensor.shape)).clone()
            for name, tensor in layout.tensors.items()
        }
        if model.e_score_correction_bias:  # of routers, zeros as in an engine
            experts = [layer for layer in range(model.num_hidden_layers) if model.has_experts(layer)]
            biases = {f"model.layers.{layer}.mlp.{BIAS}": (model.num_experts or 0,) for layer in experts}
            tensors = described.layout(model, biases).tensors
            on_disk |= {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
        kind = getattr(transformers, described.architecture)
        module = load_transformers(kind, None, hf_config(model, "fp32"), state_dict=on_disk)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module = module.to(device=device, dtype=dtype)
        for name, buffer in buffers.items():  # rotary angles are float32 in every format, transformers' and ours
            parent, leaf = name.rsplit(".", 1)
            setattr(module.get_submodule(parent), leaf, buffer.to(device))
        made = cls(model, module)
        made._shapes, made._layout = shapes, layout
        return made

    def multiply_in_float8(self, recipe: Recipe) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config: Any = Float8LinearConfig.from_recipe_name(recipe)
        emulates = next(self.module.parameters()).device.type == "cpu"

        def is_converted(module: nn.Module, path: str) -> bool:
            return not {"lm_head", "gate", "router", "experts"} & set(path.split("."))

        config = dataclasses.replace(config, emulate=emulates)
        convert_to_float8_training(self.module, module_filter_fn=is_converted, config=config)

    def outputs(self, rows: Rows, columns: Tensor | None = None, *, layers: bool = False) -> dict[str, Tensor]:
        is_double = next(self.module.parameters()).dtype == torch.float64
        with _ReallyFloat64(self.module) if is_double else nullcontext():
            if rows.positions is None or rows.real is not None or not self.runs_documents_alone:
                return self._pass(rows, columns, layers)
            tokens, wholes = rows.tokens, dict[str, Tensor]()
            columns = torch.arange(tokens.shape[1], device=tokens.device) if columns is None else columns
            for row, start, end in _documents(rows.positions):
                inside = (columns >= start) & (columns < end)
                if inside.any():
                    document = Rows(tokens[row : row + 1, start:end])
                    for name, value in self._pass(document, columns[inside] - start, layers).items():
                        if name not in wholes:
                            wholes[name] = value.new_zeros(len(tokens), len(columns), value.shape[2])
                        wholes[name][row, inside] = value[0]
            return wholes

    def _pass(self, rows: Rows, columns: Tensor | None, layers: bool) -> dict[str, Tensor]:
        # from positions that restart, without a mask, transformers derives the mask of each layer and window
        options = {"position_ids": rows.positions}
        if rows.real is not None:
            options = {"position_ids": (rows.real.cumsum(1) - 1).clamp(min=0), "attention_mask": rows.real.long()}
        if columns is not None:
            options["logits_to_keep"] = columns
        with layer_outputs(self.module, self.model, columns, is_on=layers) as outputs:
            logits: Tensor = self.module(rows.tokens, use_cache=False, **options).logits
        return {**outputs, HEAD: logits}

    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        from transformers.core_model_loading import revert_weight_conversion

        values = {name: value_of(parameter) for name, parameter in self.module.named_parameters()}
        on_disk = revert_weight_conversion(self.module, values)  # as save_pretrained does
        assert on_disk.keys() == self._layout.tensors.keys(), on_disk.keys() ^ self._layout.tensors.keys()
        read = _reading(on_disk)
        blocks = ((name, self._layout.read_own(read, name, _everything(shape))) for name, shape in self._shapes.items())
        return {name: as_numpy(block) for name, block in blocks}


def load_transformers(kind: Any, folder: Path | None, config: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Loads a model of transformers' class `kind` with its output head, in fp32 and evaluation mode.

    folder: where its weights are; None: in the option `state_dict`. config: as in config.json; None: the folder's.
    Raises LaunchError if transformers refuses, or has no weights of a parameter.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    subject, advice = (str(folder), "") if folder else ("this model", ": try --reference self")
    if folder is not None:
        if (folder / ADAPTER).is_file():  # with peft, transformers would load it too, and import what it names
            raise LaunchError(
                f"{folder}: holds an adapter beside the model: move {ADAPTER} away, or merge it with peft"
            )
        # as our reader chooses, so that no pickle is read where there is none to be read
        options["use_safetensors"] = any((folder / name).is_file() for name in (WEIGHTS, INDEX))
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it lists layers that a shortened config leaves out
    try:
        if config is not None:
            options["config"] = AutoConfig.for_model(**config)
        else:
            options["config"] = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        options["config"]._attn_implementation = None  # one with a slash is code on the hub, fetched and run
        # fused experts accept only widths that are multiples of 16 bytes, and change from version to version
        module, report = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            experts_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            **options,
        )
    except Exception as error:  # whatever transformers raises is about the model it was given
        reason = " ".join(str(error).split())
        raise LaunchError(f"{subject}: transformers cannot load it: {reason}{advice}") from None
    finally:
        logging.set_verbosity(verbosity)
    if missing := report["missing_keys"]:  # transformers would initialize them at random
        raise LaunchError(f"{subject}: transformers finds no weights for {', '.join(sorted(missing))}{advice}")
    if folder is None and (unexpected := report["unexpected_keys"]):
        raise LaunchError(f"{subject}: transformers knows no weights {', '.join(sorted(unexpected))}{advice}")
    return module.eval()


@contextmanager
def layer_outputs(
    module: Any, model: ModelConfig, columns: Tensor | slice | None = None, *, is_on: bool = True
) -> Iterator[dict[str, Tensor]]:
    """Collects the output `[B, K, hidden]` of every layer but the head in the forward passes inside the block; nothing
    unless `is_on`.

    module: our decoder, a stage of it, or a causal language model of transformers, of the sizes of `model`. The latter
    may scale embeddings or add positions outside of any module, so its embedding is observed as the input of its first
    block, under the name of our last layer before the blocks, and its last norm as the input of its head.
    """
    outputs: dict[str, Tensor] = {}
    if not is_on:
        yield outputs
        return
    specs = decoder_layers(model)[:-1]
    columns = slice(None) if columns is None else columns

    def keep(name: str, value: Any, columns: Tensor | slice = columns) -> None:
        outputs[name] = (value[0] if isinstance(value, tuple) else value).detach()[:, columns].clone()

    def on_output(name: str, _: nn.Module, inputs: Any, output: Any) -> None:
        keep(name, output)

    def on_input(name: str, columns: Tensor | slice, _: nn.Module, inputs: Any, named_inputs: Any) -> None:
        keep(name, inputs or named_inputs["hidden_states"], columns)

    if hasattr(module, "get_output_embeddings"):
        blocks = [spec for spec in specs if spec.is_block]
        lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
        theirs = next(part for part in lists if len(part) == len(blocks))
        named = {spec.name: block for spec, block in zip(blocks, theirs, strict=True)}
        embedding, head = specs[specs.index(blocks[0]) - 1].name, module.get_output_embeddings()
        # the input of the head has been reduced to the columns already
        inputs = ((theirs[0], embedding, columns), (head, specs[-1].name, slice(None)))
        handles = [part.register_forward_pre_hook(partial(on_input, *at), with_kwargs=True) for part, *at in inputs]
    else:
        ours: dict[str, nn.Module] = {part.layer_name: part for part in module.modules() if hasattr(part, "layer_name")}
        named = {spec.name: ours[spec.name] for spec in specs if spec.name in ours}
        handles = []
    handles += [part.register_forward_hook(partial(on_output, name)) for name, part in named.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _documents(positions: Tensor) -> list[tuple[int, int, int]]:
    """Returns the row, start and end of every packed document, short ones first: transformers' dynamic rotary scaling
    remembers the longest sequence until it sees a short one."""
    found = (positions == 0).nonzero().tolist()
    ends = [start or positions.shape[1] for _, start in found[1:]] + [positions.shape[1]]
    documents = [(row, start, end) for (row, start), end in zip(found, ends, strict=True)]
    return sorted(documents, key=lambda document: document[2] - document[1])


def _reading(tensors: Mapping[str, Tensor]) -> Callable[[str, tuple[slice, ...]], Tensor]:
    return lambda name, where: tensors[name][where]


def _everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


class SerialReference(Model):
    """Our own layers in order: for what transformers does not compute, such as our dropout, and to compare with it."""

    @classmethod
    def of(cls, start: InitialModel, dtype: torch.dtype, device: str) -> Self:
        config = start.config
        make = partial(make_layer, seed=config.training.seed, initializer_range=config.model.initializer_range)
        module = SerialModel(decoder_layers(config.model), TensorParallel(), make)
        with torch.no_grad():
            for _, parameter in named_shards(module):
                for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                    value = parameter[piece.target].numpy()
                    initial = start.initial_value(piece.name, value, piece.source, piece.shape)
                    parameter[piece.target] = torch.from_numpy(initial)
        return cls(config.model, module.to(device=device, dtype=dtype).eval())

    def multiply_in_float8(self, recipe: Recipe) -> None:
        use_float8(self.module, recipe)

    def outputs(self, rows: Rows, columns: Tensor | None = None, *, layers: bool = False) -> dict[str, Tensor]:
        with layer_outputs(self.module, self.model, columns, is_on=layers) as outputs:
            samples = rows.samples if self.model.has_dropout else None
            hidden, weight = self.module(rows.tokens, rows.positions, samples)
        hidden = hidden if columns is None else hidden[:, columns]
        cap = self.model.final_logit_softcapping
        return {**outputs, HEAD: head_logits(hidden, weight, self.model.vocab_size, TensorParallel(), cap)}

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


def initial_weights(start: InitialModel) -> dict[str, np.ndarray]:
    """Returns the global weights that every layout and reference starts from."""
    return SerialReference.of(start, torch.float32, "cpu").named(lambda parameter: parameter.detach())


def as_numpy(value: Tensor) -> np.ndarray:
    """Copies a tensor to float32, or float64 if it is that."""
    value = value.detach().cpu()
    return (value if value.dtype == torch.float64 else value.float()).numpy().copy()
