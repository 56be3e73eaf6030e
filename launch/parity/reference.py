"""Solves a problem on one process: a model of launch/reference, trained by torch's optimizers.

In: a `ParityProblem`. Out: `Observations` in float64 (the truth), float32, or a half precision over float32 master
weights. Nothing of DeepSpeed and nothing parallel is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launch.parity.observations import (
    NEAR_CHOICES,
    SOURCE_LOSS,
    TOKEN_LOSS,
    Observations,
    Quantity,
    around,
    by_source,
    by_step,
)
from launch.parity.problem import FP16_SCALE_POWER, Batch, Dtype, ParityProblem, Training
from launch.parity.reference_optimizers import ReferenceOptimizer
from launch.reference.models import HEAD, Model, Rows, as_numpy
from megalite.config import ModelConfig

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# relative to the spread of a router's logits: float32 has errors of 1e-6, and hardly ever larger ones than this
NEAR = 1e-5
SGD_MOVEMENT = 0.02  # fraction of the norm of all weights per clipped step: above rounding, below divergence


def sgd_settings(kind: type[Model], problem: ParityProblem, device: str) -> tuple[float, float]:
    """Returns a learning rate, and a clip that is active only at the noisy steps of `ParityProblem.sgd`, both rounded
    to two digits so that every reference gives the same."""
    model = kind.of(problem, torch.float32, device)
    norms = []
    for batch in problem.sgd(1.0, 0.0).batches[:2]:
        model.module.zero_grad()
        _loss(model, batch).backward()
        norms.append(_norm([parameter.grad for parameter in model.module.parameters()]))
    clip = (norms[0] * norms[-1]) ** 0.5 if len(norms) > 1 else norms[0] / 2
    weights = _norm([parameter.detach() for parameter in model.module.parameters()])
    return float(f"{SGD_MOVEMENT * weights / clip:.2g}"), float(f"{clip:.2g}")


def solve(
    kind: type[Model], problem: ParityProblem, training: Training, dtype: Dtype, device: str, accumulation: int = 1
) -> Observations:
    """Trains on one process; sums gradients of half-precision micro-batches in the config's format."""
    precision = problem.config.precision
    model = kind.of(problem, TORCH_DTYPES[precision.dtype if dtype == "float8" else dtype], device)
    if dtype == "float8" and precision.float8 != "none":
        model.multiply_in_float8(precision.float8)
    exact = kind.of(problem, torch.float64 if dtype == "fp64" else torch.float32, device)
    pairs = list(zip(exact.module.parameters(), model.module.parameters(), strict=True))
    optimizer = ReferenceOptimizer(training, exact)
    seen: Observations = {}

    def see(kind: str, values: Mapping[str, Any], step: int = 1) -> None:
        seen[Quantity(training.name, kind, step)] = {name: np.asarray(value) for name, value in values.items()}

    near_choices: list[int] = []
    handles = [
        router.register_forward_hook(_counting(near_choices, problem.config.model)) for router in model.routers()
    ]
    first = training.batches[0]
    with torch.no_grad():
        outputs = {name: as_numpy(value) for name, value in model.outputs(_rows(model, first), layers=True).items()}
        see("logits", {"logits": outputs.pop(HEAD)})
        see("activation", outputs)
        before, tokens, norms = _loss(model, first).item(), [], []
    for step, batch in enumerate(training.batches):
        tokens.append(_backward(model, exact, batch, training, training.micro_batches(accumulation, step)))
        if step == 0 or training.is_deep:
            see("gradient", exact.named(_gradient), step + 1)
        if batch.sources is not None:
            of_tokens = batch.sources[np.nonzero(batch.targets != -100)[0]]
            sums, counts = np.bincount(of_tokens, tokens[-1].astype(np.float64)), np.bincount(of_tokens)
            see(SOURCE_LOSS, by_source(sums, counts), step + 1)
        norms.append(_norm([_gradient(parameter) for parameter, _ in pairs]))
        clip = training.config.training.gradient_clipping
        if clip:
            nn.utils.clip_grad_norm_(exact.module.parameters(), clip)
        optimizer.step(training.learning_rate(step))
        with torch.no_grad():
            for parameter, copy in pairs:
                copy.copy_(parameter)
    see(TOKEN_LOSS, {f"step {step}": losses for step, losses in enumerate(tokens, start=1)})
    see("loss", by_step([float(losses.mean(dtype=np.float64)) for losses in tokens]))
    see("gradient norm", by_step(norms))
    with torch.no_grad():
        see("evaluation loss", around(before, _loss(model, first).item()))
    see("weight", exact.named(lambda parameter: parameter.detach()))
    for moment, values in optimizer.moments().items():
        see(moment, values)
    for handle in handles:
        handle.remove()
    if handles:
        see(NEAR_CHOICES, {"all": np.array([sum(near_choices)])})
    return seen


def _counting(near_choices: list[int], model: ModelConfig) -> Callable[[nn.Module, tuple[Tensor, ...], Any], None]:
    def count(router: nn.Module, inputs: tuple[Tensor, ...], _: Any) -> None:
        with torch.no_grad():
            logits = nn.functional.linear(inputs[0].flatten(0, -2), router.get_parameter("weight"))
            scores = logits.sigmoid() if model.scoring_func == "sigmoid" else logits
            if model.topk_group < model.n_group:
                groups = scores.unflatten(1, (model.n_group, -1))
                of_groups = groups.topk(1 if model.group_score == "max" else 2).values.sum(-1)
                count_near(of_groups, model.topk_group, scores.std())
                least = of_groups.topk(model.topk_group).values[:, -1:]
                scores = groups.where((of_groups >= least).unsqueeze(-1), float("-inf")).flatten(1)
            count_near(scores, model.num_experts_per_tok, scores[scores.isfinite()].std())

    def count_near(scores: Tensor, chosen: int, deviation: Tensor) -> None:
        if chosen < scores.shape[1]:
            best = scores.topk(chosen + 1, dim=1).values
            near_choices.append(int((best[:, -2] - best[:, -1] < NEAR * deviation).sum()))

    return count


def _backward(model: Model, exact: Model, batch: Batch, training: Training, accumulation: int) -> np.ndarray:
    """Returns the loss of each valid token; stores the gradient of their mean in `exact`, in its weights' format."""
    scale = 2.0**FP16_SCALE_POWER if next(model.module.parameters()).dtype == torch.float16 else 1.0
    sums_in_fp32 = training.config.precision.gradient_accumulation_dtype == "fp32"
    exact.module.zero_grad()
    model.module.zero_grad()
    model.module.train(model.model.has_dropout)
    valid, rows, losses = int((batch.targets != -100).sum()), len(batch.tokens) // accumulation, []
    for index in range(accumulation):
        part = batch.rows(slice(index * rows, (index + 1) * rows))
        of_tokens = _loss(model, part, reduction="none")
        (of_tokens.sum() / valid * scale).backward()
        losses.append(as_numpy(of_tokens)[part.targets.flatten() != -100])
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


def _rows(model: Model, batch: Batch) -> Rows:
    arrays = (batch.tokens, batch.positions, batch.samples)
    tensors = (None if array is None else torch.from_numpy(array).to(model.device) for array in arrays)
    return Rows(*tensors)  # type: ignore[arg-type]  # tokens are always there


def _loss(model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
    logits = model.outputs(_rows(model, batch))[HEAD]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    targets = torch.from_numpy(batch.targets).to(logits.device)
    return nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction=reduction)


def _norm(tensors: list[Any]) -> float:
    """Returns the 2-norm of all tensors, computed in float64 so that the reference's norm has no rounding error."""
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())
