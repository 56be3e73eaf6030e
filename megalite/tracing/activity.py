"""A ring buffer of what this rank did last, from which a report explains why a run hangs.

The loop records phases, the engine the operations inside them. A record is written before the operation it names, so
the last one is the current operation. It costs well under a microsecond and never waits for the device: on an
accelerator records show where the host is, which may be ahead of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic
from typing import Any, NamedTuple

from megalite.parallel.mesh import Mesh
from megalite.tracing.tape import Tape

RING = 64  # records: some steps of a plain engine, the last few micro-batches of a pipeline stage
NOBODY: tuple[int, ...] = ()


class Phase(StrEnum):
    """Parts of the loop; every rank goes through the same phases in the same order."""

    STARTING = "starting"
    LOADING = "loading"  # a checkpoint, at the start or in a rollback
    DATA = "data"
    STEP = "step"
    EVALUATION = "evaluation"
    SELF_CHECK = "self_check"
    LOGGING = "logging"
    WRITING = "writing"  # waiting for the files of the previous save
    CHECKPOINT = "checkpoint"  # the blocking part of a save


class Operation(StrEnum):
    """Parts of a phase."""

    BEGIN = "begin"  # of the phase
    COUNT_TOKENS = "count_tokens"
    MEET = "meet"  # a barrier, or a reduction over all ranks
    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight_gradient"  # apart from the backward, which computed the gradients of inputs
    SEND_ACTIVATION = "send_activation"
    AWAIT_ACTIVATION = "await_activation"  # the end of a send
    RECEIVE_ACTIVATION = "receive_activation"
    SEND_GRADIENT = "send_gradient"
    AWAIT_GRADIENT = "await_gradient"  # the end of a send
    RECEIVE_GRADIENT = "receive_gradient"
    REDUCE_TIED_GRADIENTS = "reduce_tied_gradients"
    REDUCE_GRADIENTS = "reduce_gradients"
    OPTIMIZER = "optimizer"
    GATHER_WEIGHTS = "gather_weights"
    BALANCE_EXPERTS = "balance_experts"  # the bias of their choice
    LOSS = "loss"
    UNITE_TIED_WEIGHTS = "unite_tied_weights"
    FINISH = "finish"  # all work is queued on the device, and its results are read next


TOGETHER = frozenset(
    {Phase.STARTING, Phase.LOADING, Phase.EVALUATION, Phase.SELF_CHECK, Phase.WRITING, Phase.CHECKPOINT}
)  # phases in which each rank waits for all others
KINDS = {Phase.DATA: Phase.STEP, Phase.LOGGING: Phase.STEP}  # phases that are timed as part of another


@dataclass(frozen=True)
class Peers:
    """The global ranks with which one rank communicates; groups contain the rank itself."""

    everyone: tuple[int, ...]
    tensor: tuple[int, ...]  # its tensor-parallel group
    layer: tuple[int, ...]  # ranks that share its layers and samples: those of tensor and context parallelism
    data: tuple[int, ...]  # ranks that hold the same shard, one per copy of the weights
    stage: tuple[int, ...]  # all ranks of its pipeline stage
    experts: tuple[int, ...]  # the ranks that have its shard of a layer's experts between them

    @classmethod
    def of(cls, mesh: Mesh, rank: int) -> Peers:
        """Returns the peers of `rank`."""
        replicas, slices = range(mesh.replicas), range(mesh.tensor_parallel_size)
        at = mesh.coordinate(rank)
        stage, replica, cut = at.pipeline_rank, at.replica, at.tensor_rank
        sharing = range(replica - at.context_rank, replica - at.context_rank + mesh.context_parallel_size)
        return cls(
            everyone=tuple(range(mesh.world_size)),
            tensor=tuple(mesh.rank(stage, replica, each) for each in slices),
            layer=tuple(mesh.rank(stage, one, other) for one in sharing for other in slices),
            data=tuple(mesh.rank(stage, each, cut) for each in replicas),
            stage=tuple(mesh.rank(stage, one, other) for one in replicas for other in slices),
            experts=tuple(mesh.rank(stage, each, cut) for each in mesh.sharing_experts(replica)),
        )


class Note(NamedTuple):
    """One record of the ring."""

    time: float  # time.monotonic at its start
    phase_number: int  # number of phases begun so far, equal on all ranks for the same phase
    step: int
    phase: Phase
    operation: Operation
    micro_batch: int | None  # of this replica and step, from 1; of a collective of a bucket its number
    peers: tuple[int, ...]  # the global ranks that it may wait for; may contain the rank itself
    chunk: int | None = None  # position in the model, from 0, of the chunk that computes, or that uses a message


class Span(NamedTuple):
    """Work in progress that the watchdog times: a step with its data and logging, an evaluation, a save."""

    kind: Phase
    step: int
    began: float  # time.monotonic; of its last progress, if it reports any


class FinishedSpan(NamedTuple):
    """Work that has ended."""

    kind: Phase
    began: float  # time.monotonic
    seconds: float  # since it began, or since its last progress


class Activity:
    """The records of one rank. Written by the thread that trains, read by any other."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.peers = mesh, rank, Peers.of(mesh, rank)
        self.ended: deque[FinishedSpan] = deque(maxlen=RING)  # until a reader removes them
        self.span = Span(Phase.STARTING, 0, monotonic())
        self.batch_changes = 0  # stages of training that have begun: steps may take much longer than those before
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=RING)  # the fields of a `Note`
        self._resumed: tuple[Any, ...] | None = None  # the record behind the last interruption
        self._phase, self._phase_number, self._step = Phase.STARTING, 0, 0
        self.tape: Tape | None = None  # takes all records, if there is one
        self.begin_phase(Phase.STARTING)

    def begin_phase(self, phase: Phase, step: int | None = None) -> None:
        """Records that `phase` begins, and with it the work for `step` if given (from 1).

        Must be called in the same order on all ranks: the count of phases shows which ranks are behind.
        """
        if step is not None:
            self._step = step
        self._phase, self._phase_number = phase, self._phase_number + 1
        kind, now = KINDS.get(phase, phase), monotonic()
        if (kind, self._step) != self.span[:2]:
            self.ended.append(FinishedSpan(self.span.kind, self.span.began, now - self.span.began))
            self.span = Span(kind, self._step, now)
        self.record_op(Operation.BEGIN, peers=self.peers.everyone if phase in TOGETHER else NOBODY)

    def progress(self) -> None:
        """Restarts the clock of the current span, which is long but advances. Only for the thread that trains."""
        self.span = self.span._replace(began=monotonic())

    def record_op(
        self,
        operation: Operation,
        micro_batch: int | None = None,
        peers: tuple[int, ...] = NOBODY,
        chunk: int | None = None,
    ) -> None:
        """Records the operation that comes next. Build `peers` before the run: that costs more than the record."""
        entry = (monotonic(), self._phase_number, self._step, self._phase, operation, micro_batch, peers, chunk)
        self._ring.append(entry)
        if self.tape is not None:
            self.tape.add(entry)

    @contextmanager
    def interruption(self, operation: Operation, number: int, peers: tuple[int, ...]) -> Iterator[None]:
        """Records an operation that another one starts and does not wait for, and then that other one again.

        Interruptions that follow each other leave one pair of records, the last: many buckets of gradients would
        displace what tells other ranks which messages this one has begun.
        """
        interrupted = self.now
        if self._ring[-1] is self._resumed:
            self._ring.pop()
            self._ring.pop()
        self.record_op(operation, number, peers)
        yield
        self.record_op(interrupted.operation, interrupted.micro_batch, interrupted.peers, interrupted.chunk)
        self._resumed = self._ring[-1]

    @property
    def now(self) -> Note:
        """The last record."""
        return Note(*self._ring[-1])

    def notes(self) -> list[Note]:
        """Returns the last records, oldest first; there is at least one."""
        return [
            Note(*entry) for entry in self._ring.copy()
        ]  # `copy` holds the interpreter lock, so no record is added meanwhile
