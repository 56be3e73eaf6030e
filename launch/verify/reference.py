"""What a problem's answer is, on one process: transformers' model, or our own serial one, with torch's optimizers.

In: a `Problem`. Out: `Observations` in float64 (the truth), float32, or a half precision over float32 master weights.
Nothing of DeepSpeed and nothing parallel is involved.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from launch.errors import LaunchError
from launch.verify.observations import Observations, Quantity, around, by_step
from launch.verify.problem import FP16_SCALE_POWER, Batch, Dtype, Problem, Training
from megalite.engine.optimizer import MOMENTS
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel, make_layer, named_shards
from megalite.parallel.loss import head_logits
from models.decoder import decoder_layers
from models.families import family, hf_config

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SGD_MOVEMENT = 0.02  # of the norm of all weights, per clipped step: far above rounding, far below divergence

Part = tuple[nn.Parameter, tuple[slice, ...]]


class Model(ABC):
    """One process's model in one number format."""

    module: nn.Module  # in evaluation mode
    parts: dict[str, Part]  # canonical name -> the parameter that holds it, and where
    drops = False  # has dropout, with the masks that layouts have

    @abstractmethod
    def __init__(self, problem: Problem, dtype: torch.dtype, device: str) -> None: ...

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """`[rows, seq, vocab]`."""

    @abstractmethod
    def layers(self) -> dict[str, nn.Module]:
        """The modules that put out hidden states, by the name of their layer."""

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def named(self, value_of: Callable[[nn.Parameter], Tensor]) -> dict[str, np.ndarray]:
        """`value_of` every parameter, cut into global arrays by canonical name."""
        return {name: _numpy(value_of(parameter)[where]) for name, (parameter, where) in self.parts.items()}


class TransformersModel(Model):
    """transformers' own class, its weights under our names."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = problem.config.model
        values = hf_config(model, "fp32")
        try:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        except Exception as error:  # whatever it raises is about the options it was given
            reason = " ".join(str(error).split())
            raise LaunchError(f"transformers does not build this model, {reason}: try --reference self") from None
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.module = module.to(device=device, dtype=dtype).eval()
        for name, buffer in buffers.items():  # rotary angles are float32 in every format, transformers' and ours
            parent, leaf = name.rsplit(".", 1)
            setattr(module.get_submodule(parent), leaf, buffer.to(device))
        initial = initial_weights(problem)
        hub, theirs = family(model.model_type).hub_names(initial), dict(module.named_parameters())
        self.parts = {name: (theirs[hub[name]], (slice(None),)) for name in initial}
        with torch.no_grad():
            for name, value in initial.items():
                self.parts[name][0].copy_(torch.from_numpy(value))

    def logits(self, batch: Batch) -> Tensor:
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        is_double = next(self.module.parameters()).dtype == torch.float64
        with _ReallyFloat64(self.module) if is_double else contextlib.nullcontext():
            if batch.positions is None:
                return self.module(tokens).logits
            positions = torch.from_numpy(batch.positions).to(self.device)
            document = (positions == 0).cumsum(1)
            allowed = (document.unsqueeze(2) == document.unsqueeze(1)).tril().unsqueeze(1)
            return self.module(tokens, attention_mask=allowed, position_ids=positions).logits

    def layers(self) -> dict[str, nn.Module]:
        layers = {_layer_of(name) for name in self.parts if not name.startswith("lm_head")}
        return {name: module for name, module in self.module.named_modules() if name in layers}


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`; `model.norm.weight` -> `model.norm`."""
    words = name.split(".")
    return ".".join(words[:3]) if words[1] == "layers" else ".".join(words[:-1])


class SerialReference(Model):
    """Our own layers in order: for what transformers does not compute, such as our dropout."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: str) -> None:
        self._vocabulary, self.drops = problem.config.model.vocab_size, problem.config.model.has_dropout
        self.module = _serial(problem).to(device=device, dtype=dtype).eval()
        self.parts = {piece.name: (p, piece.target) for _, p in named_shards(self.module) for piece in p.shard.pieces()}  # type: ignore[attr-defined]

    def logits(self, batch: Batch) -> Tensor:
        riders = [batch.positions] if batch.positions is not None else []
        riders += [batch.samples] if self.drops else []
        tokens, *others = (torch.from_numpy(array).to(self.device) for array in (batch.tokens, *riders))
        hidden, head_weight = self.module((tokens, *others) if others else tokens)
        return head_logits(hidden, head_weight, self._vocabulary, TensorParallel())

    def layers(self) -> dict[str, nn.Module]:
        modules = (module for module in self.module.modules() if hasattr(module, "layer_name"))
        return {str(module.layer_name): module for module in modules if module.layer_name != "lm_head"}


class _ReallyFloat64(TorchFunctionMode):
    """transformers casts to float32 where half precision would lose too much (norms, softmax); here to float64.

    Rotary angles stay float32: both sides compute them so, whatever the format of the weights.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._paused = False
        rotary = [part for part in module.modules() if hasattr(part, "inv_freq")]
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


def sgd_settings(kind: type[Model], problem: Problem, device: str) -> tuple[float, float]:
    """A learning rate, and a clip that bites at the noisy steps of `Problem.sgd` and not at the others."""
    model = kind(problem, torch.float32, device)
    norms = []
    for batch in problem.sgd(1.0, 0.0).batches[:2]:
        model.module.zero_grad()
        _loss(model.logits(batch), batch).backward()
        norms.append(_norm([parameter.grad for parameter in model.module.parameters()]))
    clip = (norms[0] * norms[-1]) ** 0.5 if len(norms) > 1 else norms[0] / 2
    weights = _norm([parameter.detach() for parameter in model.module.parameters()])
    return _round(SGD_MOVEMENT * weights / clip), _round(clip)


def _round(value: float) -> float:
    """To two digits, so that every reference gives the same."""
    return float(f"{value:.2g}")


def solve(
    kind: type[Model], problem: Problem, training: Training, dtype: Dtype, device: str, accumulation: int = 1
) -> Observations:
    """Trains on one process; gradients of half-precision micro-batches are summed as the config says."""
    model = kind(problem, TORCH_DTYPES[dtype], device)
    exact = kind(problem, torch.float64 if dtype == "fp64" else torch.float32, device)
    pairs = list(zip(exact.module.parameters(), model.module.parameters(), strict=True))
    optimizer = _optimizer(training, exact)
    seen: Observations = {}

    def see(kind: str, values: Mapping[str, Any]) -> None:
        seen[Quantity(training.name, kind)] = {name: np.asarray(value) for name, value in values.items()}

    first = training.batches[0]
    activations: dict[str, Tensor] = {}
    with torch.no_grad(), _capturing(model, activations):
        see("logits", {"logits": _numpy(model.logits(first))})
    see("activation", {name: _numpy(hidden) for name, hidden in activations.items()})
    before, tokens, norms = _evaluate(model, first), [], []
    for step, batch in enumerate(training.batches):
        tokens.append(_backward(model, exact, batch, training, accumulation))
        if step == 0:
            see("gradient", exact.named(_gradient))
        norms.append(_norm([_gradient(parameter) for parameter, _ in pairs]))
        clip = training.config.training.gradient_clipping
        if clip:
            nn.utils.clip_grad_norm_(exact.module.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate(step)
        optimizer.step()
        with torch.no_grad():
            for parameter, copy in pairs:
                copy.copy_(parameter)
    see("token loss", {f"step {step}": losses for step, losses in enumerate(tokens, start=1)})
    see("loss", by_step([float(losses.mean(dtype=np.float64)) for losses in tokens]))
    see("gradient norm", by_step(norms))
    see("evaluation loss", around(before, _evaluate(model, first)))
    see("weight", exact.named(lambda parameter: parameter.detach()))
    for moment in MOMENTS[training.config.optimizer.name]:
        see(moment, exact.named(lambda parameter: optimizer.state[parameter][moment]))  # noqa: B023
    return seen


def _optimizer(training: Training, model: Model) -> torch.optim.Optimizer:
    options = training.config.optimizer
    parameters = list(model.module.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)


def _backward(model: Model, exact: Model, batch: Batch, training: Training, accumulation: int) -> np.ndarray:
    """The loss of each valid token; the gradient of their mean, in the exact weights' format, into `exact`."""
    scale = 2.0**FP16_SCALE_POWER if next(model.module.parameters()).dtype == torch.float16 else 1.0
    sums_in_fp32 = training.config.precision.gradient_accumulation_dtype == "fp32"
    exact.module.zero_grad()
    model.module.zero_grad()
    model.module.train(model.drops)
    valid, rows, losses = int((batch.targets != -100).sum()), len(batch.tokens) // accumulation, []
    for index in range(accumulation):
        part = batch.rows(slice(index * rows, (index + 1) * rows))
        of_tokens = _loss(model.logits(part), part, reduction="none")
        (of_tokens.sum() / valid * scale).backward()
        losses.append(_numpy(of_tokens)[part.targets.flatten() != -100])
        if not sums_in_fp32 and index < accumulation - 1:
            continue  # torch sums in the format of the weights
        for parameter, copy in zip(exact.module.parameters(), model.module.parameters(), strict=True):
            gradient = _gradient(copy).to(parameter.dtype) / scale
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        model.module.zero_grad()
    model.module.eval()
    return np.concatenate(losses)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@torch.no_grad()
def _evaluate(model: Model, batch: Batch) -> float:
    return _loss(model.logits(batch), batch).item()


def _loss(logits: Tensor, batch: Batch, reduction: str = "mean") -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    targets = torch.from_numpy(batch.targets).to(logits.device)
    return nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction=reduction)


@contextlib.contextmanager
def _capturing(model: Model, outputs: dict[str, Tensor]) -> Iterator[None]:
    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            outputs[name] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.layers().items()]
    yield
    for handle in hooks:
        handle.remove()


def _norm(tensors: list[Any]) -> float:
    """In float64, so that the reference's norm carries no rounding of its own."""
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())


def _numpy(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value if value.dtype == torch.float64 else value.float()).numpy().copy()
