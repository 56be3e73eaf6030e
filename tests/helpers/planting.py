"""What goes wrong in tests: numbers that are not finite, losses that are too high, on one rank in one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import megalite.engine.stages as stages
from megalite.engine.engine import Engine
from megalite.parallel.layers import BlockInput
from megalite.resilience.guards import Guard, Intervention
from tests.helpers.engine_cases import Case

NAN = float("nan")


@dataclass(frozen=True)
class Plant:
    """Something wrong on one rank in one micro-batch (from 1), and what must be said about it."""

    kind: str  # output | backward (what an output gets back) | gradient | loss | weight | sum (finite parts, all ranks)
    where: str
    rank: int
    micro_batch: int
    lasts: bool = True  # else it happens once


class _Clock:
    """Says when the planted micro-batch runs: in every step, or in the first one only."""

    def __init__(self, plant: Plant, micro_batches: int) -> None:
        self.plant, self.micro_batches, self.ticks = plant, micro_batches, 0

    def tick(self, *_: Any) -> None:
        self.ticks += 1

    def spoiled(self, numbers: Any, value: float = NAN) -> Any:
        if isinstance(numbers, BlockInput):
            return numbers._replace(hidden=self.spoiled(numbers.hidden, value))
        step, index = divmod(self.ticks - 1, self.micro_batches)
        is_due = index == self.plant.micro_batch - 1 and (self.plant.lasts or step == 0)
        return numbers + value if is_due else numbers

    def spoil_return(self, output: Tensor) -> None:
        value = self.spoiled(torch.zeros(1))
        output.register_hook(lambda gradient: gradient + value.to(gradient.dtype))


@contextmanager
def planted(engine: Engine, case: Case, rank: int, plant: Plant) -> Iterator[None]:
    """Something is wrong while it is open. A hook that stays would change how a weight's gradient is computed."""
    with ExitStack() as undo:
        _plant(undo, engine, case, rank, plant)
        yield


def _plant(undo: ExitStack, engine: Engine, case: Case, rank: int, plant: Plant) -> None:
    clock, model = _Clock(plant, case.accumulation), engine.deepspeed.module
    parameters: dict[str, Tensor] = dict(engine.parameters())
    if engine.tied_weight is not None:
        parameters[engine.tied_weight.name] = engine.tied_weight.weight
    if plant.kind == "sum":
        undo.callback(parameters[plant.where].register_hook(lambda gradient: torch.full_like(gradient, 3e38)).remove)
    elif rank != plant.rank:
        return
    elif plant.kind in ("output", "backward"):
        layer, _, path = plant.where.partition(" ")
        (module,) = [part for part in model.modules() if getattr(part, "layer_name", "") == layer]
        chunks = [part for part in model.modules() if isinstance(part, stages.Chunk)]
        (chunk,) = [part for part in chunks if any(module is each for each in part.modules())]
        undo.callback(chunk.register_forward_pre_hook(clock.tick).remove)
        # recomputation in backward finds the same micro-batch
        hook = module.get_submodule(path).register_forward_hook(
            lambda *call: clock.spoiled(call[-1]) if plant.kind == "output" else clock.spoil_return(call[-1])
        )
        undo.callback(hook.remove)
    elif plant.kind == "gradient":
        for spoil in (clock.tick, clock.spoiled):
            undo.callback(parameters[plant.where].register_hook(spoil).remove)
    elif plant.kind == "loss":
        original = stages.head_loss

        def head_loss(*arguments: Any) -> Tensor:
            clock.tick()
            return clock.spoiled(original(*arguments), math.inf)

        undo.enter_context(patch.object(stages, "head_loss", head_loss))
    else:
        numbers = parameters[plant.where].data.view(-1)
        undo.callback(numbers[1].copy_, numbers[1].clone())
        numbers[1] = NAN


@contextmanager
def higher_losses(engine: Engine, replica: int, micro_batch: int, micro_batches: int) -> Iterator[None]:
    """The loss of one micro-batch of a replica is 30 a token higher, and its gradient the same."""
    original, calls = stages.head_loss, iter(range(1000))

    def head_loss(*arguments: Any) -> Tensor:
        is_here = engine.coordinate.data_rank == replica and next(calls) % micro_batches == micro_batch - 1
        tokens = int((arguments[2] != -100).sum()) if is_here else 0
        return original(*arguments) + 30.0 * tokens * arguments[8]  # the factor on a summed loss

    stages.head_loss = head_loss
    yield
    stages.head_loss = original


@contextmanager
def another_loss(tensor_rank: int) -> Iterator[None]:
    """Each tensor-parallel rank computes the loss for itself: let it come out a little different."""
    original = stages.head_loss
    stages.head_loss = lambda *arguments: original(*arguments) - 0.25 * tensor_rank * arguments[8]
    yield
    stages.head_loss = original


def guarded_step(engine: Engine, guard: Guard, micro_batches: Any, step: int = 7) -> Intervention | None:
    """A step, and what the guard makes of it."""
    result = engine.train_step(micro_batches, 1e-3, guard)
    return guard.after(step, result, micro_batches)
