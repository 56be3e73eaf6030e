"""Evaluates held-out samples between two steps, in parts, after each of which all ranks agree on whether to go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalite.engine.batch_transfer import MicroBatch
from megalite.engine.engine import Engine
from megalite.monitor.records.step import StepRecord
from megalite.resilience.stop_requests import StopRequests
from megalite.tracing.activity import Operation
from megalite.units import rounded

log = logging.getLogger(__name__)
PART_S = 2.0  # longest wait of a request to stop, unless the smallest part takes longer
SILENCE_S = 10.0  # between two lines about an evaluation that goes on


@dataclass(frozen=True)
class EvaluationSet:
    """One set of held-out samples with a loss of its own."""

    name: str  # "" where there is one set without a name
    micro_batches: Sequence[MicroBatch]  # this replica's; empty where a rank needs no data
    count: int  # micro-batches per replica
    targets: int  # valid ones, over all replicas: the weight of the loss in that of all sets


class _StopEvaluation(Exception):
    """Ends an evaluation on all ranks behind the same part of it."""


class _Pace:
    """Decides how large the parts of an evaluation are, equal on all ranks, and tells how far it is."""

    def __init__(self, engine: Engine, requests: StopRequests, step: int, total: int) -> None:
        self._device, self._requests, self._step, self._total = engine.deepspeed.device, requests, step, total
        self._activity = engine.activity
        # filling and draining the stages takes as long as `stages - 1` micro-batches: a fifth of a part at most
        self._least = 4 * (engine.mesh.pipeline_parallel_size - 1) + 1
        self._done, self._began = 0, time.monotonic()
        self._said = self._began

    def next_part(self, done: int) -> int:
        """Returns how many micro-batches come next, `done` more having been evaluated. Collective.

        Raises _StopEvaluation if the run is asked to end.
        """
        self._done += done
        if self._done >= self._total:
            return done  # nothing comes next
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the host runs ahead, also of requests to stop
        now = time.monotonic()
        each_s = (now - self._began) / self._done
        if now - self._said >= SILENCE_S and dist.get_rank() == 0:
            self._said, left_s = now, each_s * (self._total - self._done)
            of_all = f"{self._done:,} of {self._total:,} micro-batches"
            log.info(f"evaluating after step {self._step}: {of_all}, {rounded(left_s)} left")
        self._activity.record_op(Operation.MEET, peers=self._activity.peers.everyone)
        part = self._requests.agree_on_part(max(self._least, min(self._total, int(PART_S / max(each_s, 1e-6)))))
        if not part:
            raise _StopEvaluation
        return part


def evaluate(engine: Engine, sets: Sequence[EvaluationSet], requests: StopRequests, step: int) -> StepRecord:
    """Returns the loss of each set, and that of all: the mean over all targets; none if the run is asked to end."""
    started, losses = time.perf_counter(), dict[str, float]()
    requests.stops_after = "this part of the evaluation"
    pace = _Pace(engine, requests, step, sum(one.count for one in sets))
    try:
        for one in sets:
            losses[one.name] = float(engine.evaluate(one.micro_batches, one.count, pace.next_part))
    except _StopEvaluation:
        if dist.get_rank() == 0:
            log.info(f"the evaluation after step {step} ends without a result, because the run is asked to end")
        return {}
    finally:
        requests.stops_after = "this step"
    loss_of_all = losses[sets[0].name]
    if len(sets) > 1:
        targets = sum(one.targets for one in sets)
        loss_of_all = sum(losses[one.name] * one.targets for one in sets) / max(1, targets)
    named: StepRecord = {"evaluation_losses": losses} if sets[0].name else {}
    return {"evaluation_loss": loss_of_all, **named, "evaluation_s": time.perf_counter() - started}
