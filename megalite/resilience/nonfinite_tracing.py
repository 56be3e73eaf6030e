"""Traces a step that was not taken to the rank, layer, parameter and micro-batch where it became non-finite.

Nothing here runs while steps are taken. When one is not, each rank inspects the gradients before they are cleared, its
micro-batches' losses and its weights. A non-finite value spreads at once: through a forward pass to the loss, through
the loss to all gradients, through a reduction to all replicas. So the step is run a second time, refused from the
start, with hooks on all layers and parameters that record where the first such value appears. A step is deterministic,
so a cause in the data or the arithmetic recurs; one that does not recur lies in a device or its memory, or in a
non-deterministic kernel. The hooks see what each rank computes of each micro-batch: if the step is non-finite again
and they saw nothing, it is the sum of all gradients that overflows.
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

from megalite.distributed.agreement import from_all_ranks
from megalite.engine.batch_transfer import MicroBatch, cut_sequences
from megalite.engine.deepspeed.internals import resident_weights
from megalite.engine.deepspeed.loss_scale import loss_scaler_state, set_loss_scaler_state
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import read_gradients
from megalite.engine.step_result import StepResult
from megalite.parallel.loss import IGNORED
from megalite.tracing.activity import Activity

Phase = Literal["weights", "forward", "backward"]
LOSS = "the loss"  # the place after all layers
LAST = 1 << 30
NAMED_WEIGHTS = 3  # per rank


@dataclass(frozen=True)
class RankLocation:
    """A rank, its coordinates and its host."""

    rank: int
    stage: int
    replica: int
    tensor_rank: int
    host: str
    context_rank: int | None = None  # None: no other rank shares its sequences

    def __str__(self) -> str:
        part = "" if self.context_rank is None else f"context rank {self.context_rank}, "
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}, {part}tensor rank {self.tensor_rank})"


@dataclass(frozen=True)
class FirstNonfinite:
    """The first non-finite value on a rank, in one phase of a step."""

    phase: Phase
    where: str  # canonical path of a layer (forward) or a parameter (backward)
    micro_batch: int  # from 1
    order: int  # how many layers or parameters came before it in the micro-batch
    chunk: int | None = None  # position in the model, where stages have several


@dataclass(frozen=True)
class RankReport:
    """Observations of one rank about a step that was not taken."""

    place: RankLocation
    step_loss: float
    bad_weights: tuple[str, ...]  # parameters that are not finite
    losses: tuple[float, ...]  # mean over its valid tokens, per micro-batch; empty on ranks without the last layer
    samples: tuple[tuple[int, ...], ...]  # per micro-batch; empty on ranks that take no data
    gradient_norms: tuple[tuple[str, float], ...]  # of parameters that no other rank reports; NaN: not finite
    sightings: tuple[FirstNonfinite, ...] = ()  # of the second run


@dataclass(frozen=True)
class FaultCandidate:
    """A possible origin of the fault, and the samples computed there."""

    place: RankLocation
    phase: Phase
    where: str
    micro_batch: int | None = None  # from 1
    samples: tuple[int, ...] = ()
    loss: float | None = None  # of the micro-batch, mean over its valid tokens


def gradient_norms(engine: Engine) -> list[tuple[str, float]]:
    """Returns the 2-norm of each gradient by canonical path, NaN if not finite; collective, in `StepGate.examine`.

    Of copies on replicas and tensor-parallel ranks only the first rank reports, of dealt experts the first of each.
    """
    at = engine.coordinate
    names, norms = [], []
    for parameter, gradient in read_gradients(engine):
        shard = parameter.shard  # type: ignore[attr-defined]
        if at.replica < shard.expert_parallel_size and not (shard.is_replicated and at.tensor_rank):
            names.append(shard.name)
            norms.append(torch.linalg.vector_norm(gradient))
    return _named_norms(names, torch.stack(norms).tolist() if norms else [])


def late_gradient_norms(engine: Engine, result: StepResult) -> list[tuple[str, float]]:
    """Returns what `gradient_norms` does after a step that was skipped on the device, whose gradients are gone.

    The 2-norms of the parts that each replica has reduced were kept, and `united_norms` adds them up. Not collective.
    """
    if result.part_norms is None:
        return []
    assert engine.partitioned_step is not None
    shards = [parameter.shard for parameter in engine.partitioned_step.parts]  # type: ignore[attr-defined]
    named = _named_norms([shard.name for shard in shards], result.part_norms.tolist())
    is_first = engine.coordinate.tensor_rank == 0
    return [norm for norm, shard in zip(named, shards, strict=True) if is_first or not shard.is_replicated]


def _named_norms(names: Sequence[str], norms: Sequence[float]) -> list[tuple[str, float]]:
    return [(name, norm if math.isfinite(norm) else math.nan) for name, norm in zip(names, norms, strict=True)]


def gather_rank_reports(
    engine: Engine, result: StepResult, micro_batches: Sequence[MicroBatch], norms: Sequence[tuple[str, float]]
) -> list[RankReport]:
    """Gathers the reports of all ranks about a step that was not taken, in rank order; collective."""
    at, host = engine.coordinate, socket.gethostname()
    context_rank = at.context_rank if engine.tensor_parallel.context.size > 1 else None
    own = RankReport(
        RankLocation(dist.get_rank(), at.pipeline_rank, at.data_rank, at.tensor_rank, host, context_rank),
        result.loss,
        _bad_weights(engine),
        _token_losses(engine, result, micro_batches),
        tuple(tuple((batch.samples // engine.shape.parts).tolist()) for batch in micro_batches),
        tuple(norms),
    )
    return from_all_ranks(own, RankReport)


def run_again(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    rank_reports: Sequence[RankReport],
    loss_scaler: dict[str, float],
) -> tuple[list[RankReport], bool]:
    """Runs the step a second time under observation, without changing anything. Collective.

    Returns the reports with the sightings of the second run, and whether it was non-finite too. `loss_scaler` is the
    state of fp16's loss scale at the first run.
    """
    optimizer, learning_rate = engine.deepspeed.optimizer, engine.torch_optimizer.param_groups[0]["lr"]
    now = loss_scaler_state(optimizer)
    # that of the first run, whose overflow lowered it: with another scale it is another step
    set_loss_scaler_state(optimizer, loss_scaler)
    try:
        with _nonfinite_hooks(engine) as sightings:
            result = engine.train_step(micro_batches, learning_rate, _RefusesAll())
    finally:
        set_loss_scaler_state(optimizer, now)
    losses = _token_losses(engine, result, micro_batches)
    bad = [number for number, loss in enumerate(losses, start=1) if not math.isfinite(loss)]
    behind_all_layers = [FirstNonfinite("forward", LOSS, number, LAST) for number in bad[:1]]
    found = from_all_ranks([*sightings, *behind_all_layers], list[FirstNonfinite])
    seen = [replace(old, sightings=tuple(new)) for old, new in zip(rank_reports, found, strict=True)]
    return seen, result.skipped


class _RefusesAll:
    waits = True

    def takes(self, loss: Callable[[], float]) -> bool:
        return False

    def examine(self) -> None:
        pass


def candidates(rank_reports: Sequence[RankReport]) -> list[FaultCandidate]:
    """Returns the weights that were not finite before the step, or else the first sightings of each replica."""
    weights = [FaultCandidate(one.place, "weights", name) for one in rank_reports for name in one.bad_weights]
    if weights:
        return weights
    replicas = sorted({one.place.replica for one in rank_reports})
    return [candidate for replica in replicas for candidate in _first_of_replica(rank_reports, replica)]


def _first_of_replica(rank_reports: Sequence[RankReport], replica: int) -> Iterator[FaultCandidate]:
    """Yields the earliest sightings of a replica: a forward begins on the first stage, a backward on the last.

    Tensor-parallel ranks that computed the same values are all candidates.
    """
    members = [one for one in rank_reports if one.place.replica == replica]
    directions: dict[Phase, int] = {"forward": 1, "backward": -1}
    for phase, direction in directions.items():
        keyed = [
            ((seen.micro_batch, direction * _position(one, seen), seen.order), one.place, seen)
            for one in members
            for seen in one.sightings
            if seen.phase == phase
        ]
        if keyed:
            first = min(key for key, _, _ in keyed)
            for key, place, seen in keyed:
                if key == first:
                    samples, loss = _micro_batch(members, seen.micro_batch)
                    yield FaultCandidate(place, phase, seen.where, seen.micro_batch, samples, loss)
            return


def _position(report: RankReport, seen: FirstNonfinite) -> int:
    """Returns the position in the model of what was computing, among that on all ranks of a replica."""
    if seen.where == LOSS:  # no record says in which chunk, and it may be on any stage
        return LAST
    return report.place.stage if seen.chunk is None else seen.chunk


def highest_loss(rank_reports: Sequence[RankReport]) -> FaultCandidate:
    """Returns the micro-batch whose mean loss is the highest of all, or not finite."""
    losses = [
        (math.inf if math.isnan(loss) else loss, one, i) for one in rank_reports for i, loss in enumerate(one.losses)
    ]
    _, one, index = max(losses, key=lambda entry: entry[0])
    return FaultCandidate(one.place, "forward", LOSS, index + 1, one.samples[index], one.losses[index])


def hosts(rank_reports: Sequence[RankReport], candidates: Sequence[FaultCandidate]) -> tuple[str, ...]:
    """Returns the hosts of the candidates' replicas, or all hosts if there is no candidate."""
    replicas = {candidate.place.replica for candidate in candidates} or {one.place.replica for one in rank_reports}
    return tuple(dict.fromkeys(one.place.host for one in rank_reports if one.place.replica in replicas))


def united_norms(rank_reports: Sequence[RankReport]) -> dict[str, float]:
    """Combines the norms of tensor-parallel ranks into those of whole parameters, of which each is on one stage."""
    squares: defaultdict[str, float] = defaultdict(float)
    for one in rank_reports:
        for name, norm in one.gradient_norms:
            squares[name] += norm * norm
    return {name: math.sqrt(square) for name, square in squares.items()}


def _micro_batch(members: Sequence[RankReport], number: int) -> tuple[tuple[int, ...], float | None]:
    """Returns samples and loss of a replica's micro-batch from those of its ranks that have them."""
    samples = next((one.samples[number - 1] for one in members if one.samples), ())
    losses = [one.losses[number - 1] for one in members if one.losses]
    return samples, not_finite_first(losses) if losses else None


def not_finite_first(losses: Sequence[float]) -> float:
    """Returns the first loss that is not finite, or else the first one; those of the same tokens should be equal."""
    return next((loss for loss in losses if not math.isfinite(loss)), losses[0])


def _bad_weights(engine: Engine) -> tuple[str, ...]:
    finite = [torch.isfinite(resident_weights(parameter)).all() for _, parameter in engine.parameters()]
    flags = torch.stack(finite).tolist() if finite else []
    names = [name for (name, _), is_finite in zip(engine.parameters(), flags, strict=True) if not is_finite]
    return tuple(names[:NAMED_WEIGHTS])


def _token_losses(engine: Engine, result: StepResult, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
    if not result.micro_losses or result.token_weight is None:
        return ()
    sums = (torch.stack(result.micro_losses) / result.token_weight).tolist()
    valid = [
        int((batch.targets != IGNORED).sum()) for batch in cut_sequences(micro_batches, engine.tensor_parallel.context)
    ]
    return tuple(total / max(1, count) for total, count in zip(sums, valid, strict=True))


class _NonfiniteHooks:
    """Hooks that record the first non-finite value, once in forward and once in backward."""

    def __init__(self, activity: Activity) -> None:
        self.sightings: list[FirstNonfinite] = []
        self._activity = activity
        self._order: Counter[int] = Counter()  # calls in the forward of each micro-batch
        self._backward_order = 0

    @property
    def _micro_batch(self) -> int:
        """The micro-batch of the pass that is running, from 1; 0 for the sum of all of them."""
        return self._activity.now.micro_batch or 0

    def check_forward(self, where: str, _: nn.Module, inputs: tuple[Any, ...], *outputs: Any) -> None:
        """Checks a module's input before its forward, or its output behind it.

        The input is the first one: those beside it are the same for all layers, and masks among them hold -inf.
        """
        number = self._micro_batch
        self._order[number] += 1
        if not any(seen.phase == "forward" for seen in self.sightings) and not _is_finite(outputs or inputs[:1]):
            chunk = self._activity.now.chunk
            self.sightings.append(FirstNonfinite("forward", where, number, self._order[number], chunk))

    def check_gradient(self, where: str, gradient: Tensor) -> None:
        self._backward_order += 1
        if not self._micro_batch:  # the sum of a tied head's gradients, which came from the last stage
            return
        if not any(seen.phase == "backward" for seen in self.sightings) and not _is_finite(gradient):
            order, chunk = self._backward_order, self._activity.now.chunk
            self.sightings.append(FirstNonfinite("backward", where, self._micro_batch, order, chunk))


def _is_finite(numbers: Any) -> bool:
    if isinstance(numbers, Tensor):
        # detached: recomputation must save the same tensors each time, and `isfinite` would save some
        return not numbers.is_floating_point() or bool(torch.isfinite(numbers.detach()).all())
    return not isinstance(numbers, (tuple, list)) or all(map(_is_finite, numbers))


@contextmanager
def _nonfinite_hooks(engine: Engine) -> Iterator[list[FirstNonfinite]]:
    """Installs the hooks on all layers, parameters and the copy of a tied weight; yields the list that they fill."""
    hooks, model = _NonfiniteHooks(engine.activity), engine.deepspeed.module
    handles = []
    for layer in (part for part in model.modules() if hasattr(part, "layer_name")):
        for path, part in layer.named_modules():
            name = ".".join(filter(None, (layer.layer_name, path)))
            # a non-finite input comes from the enclosing module, between its submodules
            around = name.rpartition(".")[0] if path else name
            handles.append(part.register_forward_pre_hook(partial(hooks.check_forward, around)))
            handles.append(part.register_forward_hook(partial(hooks.check_forward, name)))
    weights: list[tuple[str, Tensor]] = list(engine.parameters())
    if (tied := engine.tied_weight) is not None and not isinstance(tied.weight, nn.Parameter):
        weights.append((tied.name, tied.weight))  # the head's copy, whose gradients leave its rank only as a sum
    for name, weight in weights:
        if weight.requires_grad:  # a weight with a hook gets its gradient in backward, also where others' are put off
            handles.append(weight.register_hook(partial(hooks.check_gradient, name)))
    try:
        yield hooks.sightings
    finally:
        for handle in handles:
            handle.remove()
