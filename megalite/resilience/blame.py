"""Who is to blame for a step that was not taken: which rank, layer, parameter and micro-batch.

While all is well nothing here runs. When a step is not taken, each rank looks at the gradients before they are
cleared, at its micro-batches' losses and at its weights. A number that is not finite spreads in no time: through a
forward pass to the loss, through the loss to all gradients, through a reduction to all replicas. So the step is run
once more, refused from the start, with hooks on all layers and parameters that note where the first such number
appears. Nothing about a step is random, so what lies in the data or the arithmetic happens again; what does not
happen again lay in neither, but in a device or its memory, or in a kernel that does not always compute the same.
The hooks see what each rank computes of each micro-batch: where the step is not finite again and they saw nothing,
it is the sum of all that that overflows.
"""

from __future__ import annotations

import math
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.engine import Engine, MicroBatch, StepResult
from megalite.engine.seams import loss_scaler_state, resident_weights, set_loss_scaler_state
from megalite.engine.state import read_gradients
from megalite.parallel.loss import IGNORED

Phase = Literal["weights", "forward", "backward"]
LOSS = "the loss"  # a place behind all layers
NAMED_WEIGHTS = 3  # of a rank, in a testimony


@dataclass(frozen=True)
class Place:
    """A rank, its coordinates and its host."""

    rank: int
    stage: int
    replica: int
    tensor_rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}, tensor rank {self.tensor_rank})"


@dataclass(frozen=True)
class Sighting:
    """The first number on a rank that is not finite, in one phase of a step."""

    phase: Phase
    where: str  # canonical path of a layer (forward) or a parameter (backward)
    micro_batch: int  # from 1
    order: int  # how many layers or parameters came before it in the micro-batch


@dataclass(frozen=True)
class Testimony:
    """What one rank knows about a step that was not taken."""

    place: Place
    step_loss: float
    bad_weights: tuple[str, ...]  # parameters that are not finite
    losses: tuple[float, ...]  # mean over the valid tokens, per micro-batch; empty on ranks without the last layer
    samples: tuple[tuple[int, ...], ...]  # per micro-batch; empty on ranks that are fed nothing
    gradient_norms: tuple[tuple[str, float], ...]  # of parameters that no other testimony speaks of; NaN: not finite
    sightings: tuple[Sighting, ...] = ()  # of the second run


@dataclass(frozen=True)
class Suspect:
    """A place where it began, and the samples that were computed on there."""

    place: Place
    phase: Phase
    where: str
    micro_batch: int | None = None  # from 1
    samples: tuple[int, ...] = ()
    loss: float | None = None  # of the micro-batch, mean over its valid tokens


def gradient_norms(engine: Engine) -> list[tuple[str, float]]:
    """The 2-norm of each gradient by canonical path, NaN where it is not finite; collective, during `Judge.examine`.

    A rank tells what it is the first to hold: replicas and tensor-parallel ranks hold the same.
    """
    at = engine.coordinate
    names, norms = [], []
    for parameter, gradient in read_gradients(engine):
        shard = parameter.shard  # type: ignore[attr-defined]
        if at.data_rank == 0 and not (shard.is_replicated and at.tensor_rank):
            names.append(shard.name)
            norms.append(torch.linalg.vector_norm(gradient))
    values = torch.stack(norms).tolist() if norms else []
    return [(name, norm if math.isfinite(norm) else math.nan) for name, norm in zip(names, values, strict=True)]


def testify(
    engine: Engine, result: StepResult, micro_batches: Sequence[MicroBatch], norms: Sequence[tuple[str, float]]
) -> list[Testimony]:
    """What every rank knows about a step that was not taken, in rank order; collective."""
    at = engine.coordinate
    own = Testimony(
        Place(dist.get_rank(), at.pipeline_rank, at.data_rank, at.tensor_rank, socket.gethostname()),
        float(result.loss),
        _bad_weights(engine),
        _token_losses(result, micro_batches),
        tuple(tuple(batch.samples.tolist()) for batch in micro_batches),
        tuple(norms),
    )
    return _from_all(own)


def run_again(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    testimonies: Sequence[Testimony],
    loss_scaler: dict[str, float],
) -> tuple[list[Testimony], bool]:
    """The testimonies with the sightings of a second run of the same step, and whether it was not finite either.

    It changes nothing. `loss_scaler` is where fp16's loss scale stood at the first run. Collective.
    """
    learning_rate = engine.torch_optimizer.param_groups[0]["lr"]
    with _loss_scaler_at(engine, loss_scaler), _watching(engine) as sightings:
        result = engine.train_step(micro_batches, learning_rate, _RefusesAll())
    losses = _token_losses(result, micro_batches)
    bad = [number for number, loss in enumerate(losses, start=1) if not math.isfinite(loss)]
    behind_all_layers = [Sighting("forward", LOSS, number, 1 << 30) for number in bad[:1]]
    found: list[list[Sighting]] = _from_all([*sightings, *behind_all_layers])
    seen = [replace(old, sightings=tuple(new)) for old, new in zip(testimonies, found, strict=True)]
    return seen, result.skipped


@contextmanager
def _loss_scaler_at(engine: Engine, state: dict[str, float]) -> Iterator[None]:
    """A step that overflowed lowered the scale: with the new one it is another step, which would lower it again."""
    optimizer = engine.deepspeed.optimizer
    now = loss_scaler_state(optimizer)
    set_loss_scaler_state(optimizer, state)
    try:
        yield
    finally:
        set_loss_scaler_state(optimizer, now)


class _RefusesAll:
    def takes(self, loss: Callable[[], float]) -> bool:
        return False

    def examine(self) -> None:
        pass


def suspects(testimonies: Sequence[Testimony]) -> list[Suspect]:
    """Where it began: weights that were not finite before the step, else the first sightings of each replica."""
    weights = [Suspect(one.place, "weights", name) for one in testimonies for name in one.bad_weights]
    if weights:
        return weights
    replicas = sorted({one.place.replica for one in testimonies})
    return [suspect for replica in replicas for suspect in _first_of_replica(testimonies, replica)]


def _first_of_replica(testimonies: Sequence[Testimony], replica: int) -> Iterator[Suspect]:
    """What a micro-batch meets first: in forward the first stage, in backward the last. Tensor-parallel ranks that
    computed the same are equally suspect."""
    members = [one for one in testimonies if one.place.replica == replica]
    directions: dict[Phase, int] = {"forward": 1, "backward": -1}
    for phase, direction in directions.items():
        keyed = [
            ((seen.micro_batch, direction * one.place.stage, seen.order), one.place, seen)
            for one in members
            for seen in one.sightings
            if seen.phase == phase
        ]
        if keyed:
            first = min(key for key, _, _ in keyed)
            for key, place, seen in keyed:
                if key == first:
                    samples, loss = _micro_batch(members, seen.micro_batch)
                    yield Suspect(place, phase, seen.where, seen.micro_batch, samples, loss)
            return


def highest_loss(testimonies: Sequence[Testimony]) -> Suspect:
    """The micro-batch whose mean loss is the highest of all, or is not finite."""
    losses = [
        (math.inf if math.isnan(loss) else loss, one, i) for one in testimonies for i, loss in enumerate(one.losses)
    ]
    _, one, index = max(losses, key=lambda entry: entry[0])
    return Suspect(one.place, "forward", LOSS, index + 1, one.samples[index], one.losses[index])


def hosts(testimonies: Sequence[Testimony], suspects: Sequence[Suspect]) -> tuple[str, ...]:
    """Where what the suspects showed can have begun: the hosts of their replicas, or all where there is no suspect."""
    replicas = {suspect.place.replica for suspect in suspects} or {one.place.replica for one in testimonies}
    return tuple(dict.fromkeys(one.place.host for one in testimonies if one.place.replica in replicas))


def gradients_not_finite(testimonies: Sequence[Testimony]) -> tuple[list[str], int]:
    """The parameters whose summed gradient is not finite, and how many parameters there are."""
    norms = _united_norms(testimonies)
    return [name for name, norm in norms.items() if math.isnan(norm)], len(norms)


def largest_gradients(testimonies: Sequence[Testimony], count: int) -> list[tuple[str, float]]:
    """The parameters with the largest gradient norms."""
    return sorted(_united_norms(testimonies).items(), key=lambda item: -item[1])[:count]


def _united_norms(testimonies: Sequence[Testimony]) -> dict[str, float]:
    """Norms of whole parameters from those of tensor-parallel ranks; of a tied weight, the first stage's."""
    stage_of: dict[str, int] = {}
    squares: defaultdict[str, float] = defaultdict(float)
    for one in testimonies:
        for name, norm in one.gradient_norms:
            if stage_of.setdefault(name, one.place.stage) == one.place.stage:
                squares[name] += norm * norm
    return {name: math.sqrt(square) for name, square in squares.items()}


def _micro_batch(members: Sequence[Testimony], number: int) -> tuple[tuple[int, ...], float | None]:
    """Samples and loss of a replica's micro-batch, whichever of its ranks know them."""
    samples = next((one.samples[number - 1] for one in members if one.samples), ())
    losses = [one.losses[number - 1] for one in members if one.losses]
    return samples, not_finite_first(losses) if losses else None


def not_finite_first(losses: Sequence[float]) -> float:
    """What ranks say that should say the same: the first that is not finite, or the first of all."""
    return next((loss for loss in losses if not math.isfinite(loss)), losses[0])


def _bad_weights(engine: Engine) -> tuple[str, ...]:
    finite = [torch.isfinite(resident_weights(parameter)).all() for _, parameter in engine.parameters()]
    flags = torch.stack(finite).tolist() if finite else []
    names = [name for (name, _), is_finite in zip(engine.parameters(), flags, strict=True) if not is_finite]
    return tuple(names[:NAMED_WEIGHTS])


def _token_losses(result: StepResult, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
    if not result.micro_losses or result.token_weight is None:
        return ()
    sums = (torch.stack(result.micro_losses) / result.token_weight).tolist()
    valid = [int((batch.targets != IGNORED).sum()) for batch in micro_batches]
    return tuple(total / max(1, count) for total, count in zip(sums, valid, strict=True))


def _from_all(own: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


class _Watch:
    """Hooks that note the first number that is not finite, once in forward and once in backward."""

    def __init__(self) -> None:
        self.sightings: list[Sighting] = []
        self._micro_batch, self._order = 0, 0
        self._backward_order = 0
        self._gradients_of: Counter[str] = Counter()  # parameter -> micro-batches that reached it in backward

    def next_micro_batch(self, *_: Any) -> None:
        self._micro_batch, self._order = self._micro_batch + 1, 0

    def enter(self, where: str, _: nn.Module, inputs: Any) -> None:
        self._see_forward(where, inputs)

    def leave(self, where: str, _: nn.Module, inputs: Any, outputs: Any) -> None:
        self._see_forward(where, outputs)

    def see_gradient(self, where: str, gradient: Tensor) -> None:
        self._backward_order += 1
        self._gradients_of[where] += 1
        if not any(seen.phase == "backward" for seen in self.sightings) and not _is_finite(gradient):
            self.sightings.append(Sighting("backward", where, self._gradients_of[where], self._backward_order))

    def _see_forward(self, where: str, numbers: Any) -> None:
        self._order += 1
        if not any(seen.phase == "forward" for seen in self.sightings) and not _is_finite(numbers):
            self.sightings.append(Sighting("forward", where, self._micro_batch, self._order))


def _is_finite(numbers: Any) -> bool:
    if isinstance(numbers, Tensor):
        # detached: recomputation wants the same tensors saved each time, and `isfinite` would save some
        return not numbers.is_floating_point() or bool(torch.isfinite(numbers.detach()).all())
    return not isinstance(numbers, (tuple, list)) or all(map(_is_finite, numbers))


@contextmanager
def _watching(engine: Engine) -> Iterator[list[Sighting]]:
    """Yields what is sighted on this rank while it is open."""
    watch, model = _Watch(), engine.deepspeed.module
    handles = [model.register_forward_pre_hook(watch.next_micro_batch)]
    for layer in (part for part in model.modules() if hasattr(part, "layer_name")):
        for path, part in layer.named_modules():
            name = ".".join(filter(None, (layer.layer_name, path)))
            # what goes in wrong was made wrong by the part around it, between its other parts
            around = name.rpartition(".")[0] if path else name
            handles.append(part.register_forward_pre_hook(partial(watch.enter, around)))
            handles.append(part.register_forward_hook(partial(watch.leave, name)))
    for name, parameter in engine.parameters():
        handles.append(parameter.register_hook(partial(watch.see_gradient, name)))
    try:
        yield watch.sightings
    finally:
        for handle in handles:
            handle.remove()
