"""What this rank is doing: a ring of its last notes, for whoever must explain why nothing moves.

The loop notes phases, the engine what it does inside them. A note is written before the thing it names, so the last
one is what the rank is at. It costs well under a microsecond and never looks at the device: on an accelerator notes
tell where the host is, which may be ahead of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic
from typing import NamedTuple

from megalite.parallel.mesh import Mesh

RING = 64  # notes: some steps of a plain engine, the last few micro-batches of a pipeline stage
NOBODY: tuple[int, ...] = ()


class Phase(StrEnum):
    """Parts of the loop; every rank goes through the same ones in the same order."""

    STARTING = "starting"
    LOADING = "loading"  # a checkpoint, at the start or in a rollback
    DATA = "data"
    STEP = "step"
    EVALUATION = "evaluation"
    SELF_CHECK = "self_check"
    LOGGING = "logging"
    WRITING = "writing"  # waits for the files of a save before
    CHECKPOINT = "checkpoint"  # the part of a save that blocks


class Operation(StrEnum):
    """Parts of a phase."""

    BEGIN = "begin"  # of the phase
    COUNT_TOKENS = "count_tokens"
    MEET = "meet"  # a barrier, or the agreement of all ranks on something
    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_ACTIVATION = "send_activation"
    RECEIVE_ACTIVATION = "receive_activation"
    SEND_GRADIENT = "send_gradient"
    RECEIVE_GRADIENT = "receive_gradient"
    REDUCE_TIED_GRADIENTS = "reduce_tied_gradients"
    REDUCE_GRADIENTS = "reduce_gradients"
    OPTIMIZER = "optimizer"
    LOSS = "loss"
    UNITE_TIED_WEIGHTS = "unite_tied_weights"
    FINISH = "finish"  # everything is handed to the device, whose results are read next


TOGETHER = frozenset(
    {Phase.STARTING, Phase.LOADING, Phase.EVALUATION, Phase.SELF_CHECK, Phase.WRITING, Phase.CHECKPOINT}
)  # all ranks need all
KINDS = {Phase.DATA: Phase.STEP, Phase.LOGGING: Phase.STEP}  # what is not timed on its own


@dataclass(frozen=True)
class Peers:
    """The global ranks that one rank exchanges something with; it is itself among those of a group."""

    everyone: tuple[int, ...]
    tensor: tuple[int, ...]  # its tensor-parallel group
    data: tuple[int, ...]  # its data-parallel group: they hold what it holds
    stage: tuple[int, ...]  # all ranks of its pipeline stage
    previous: tuple[int, ...]  # where its activations come from; nobody on the first stage
    next: tuple[int, ...]  # where its activations go; nobody on the last stage
    loss: tuple[int, ...]  # the last stage averages the loss over its replicas and tells the stages of its own

    @classmethod
    def of(cls, mesh: Mesh, rank: int) -> Peers:
        """Those of `rank`."""
        stages, replicas, slices = (
            mesh.pipeline_parallel_size,
            range(mesh.data_parallel_size),
            range(mesh.tensor_parallel_size),
        )
        at = mesh.coordinate(rank)
        stage, replica, cut = at.pipeline_rank, at.data_rank, at.tensor_rank
        data = tuple(mesh.rank(stage, each, cut) for each in replicas)
        pipeline = tuple(mesh.rank(each, replica, cut) for each in range(stages))
        return cls(
            everyone=tuple(range(mesh.world_size)),
            tensor=tuple(mesh.rank(stage, replica, each) for each in slices),
            data=data,
            stage=tuple(mesh.rank(stage, one, other) for one in replicas for other in slices),
            previous=(mesh.rank(stage - 1, replica, cut),) if stage > 0 else NOBODY,
            next=(mesh.rank(stage + 1, replica, cut),) if stage < stages - 1 else NOBODY,
            loss=tuple(sorted({*data, *pipeline})) if stage == stages - 1 else pipeline[-1:],
        )


class Note(NamedTuple):
    """One entry of the ring."""

    time: float  # time.monotonic when it began
    phase_number: int  # how many phases had begun, the same for a phase on all ranks
    step: int
    phase: Phase
    operation: Operation
    micro_batch: int | None  # of this replica and step, from 1
    peers: tuple[int, ...]  # the global ranks that it may have to wait for; the rank itself may be among them


class Stretch(NamedTuple):
    """Work that ends within a learned time or not at all: a step with its data and logging, an evaluation, a save."""

    kind: Phase
    step: int
    began: float  # time.monotonic; when it last told of progress, if it does


class Ended(NamedTuple):
    """A stretch that did end."""

    kind: Phase
    began: float  # time.monotonic
    seconds: float  # since it began, or since it last told of progress


class Activity:
    """One rank's notes. Written by the thread that trains, read by any other."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.peers = mesh, rank, Peers.of(mesh, rank)
        self.ended: deque[Ended] = deque(maxlen=RING)  # stretches, until somebody takes them out
        self.stretch = Stretch(Phase.STARTING, 0, monotonic())
        self._ring: deque[tuple[float, int, int, Phase, Operation, int | None, tuple[int, ...]]] = deque(maxlen=RING)
        self._phase, self._phase_number, self._step = Phase.STARTING, 0, 0
        self.begin(Phase.STARTING)

    def begin(self, phase: Phase, step: int | None = None) -> None:
        """Notes that `phase` begins, and with it the work for `step` where one is given (from 1).

        Must be called alike on all ranks: that is how a rank that is behind is told from one that is ahead.
        """
        if step is not None:
            self._step = step
        self._phase, self._phase_number = phase, self._phase_number + 1
        kind, now = KINDS.get(phase, phase), monotonic()
        if (kind, self._step) != self.stretch[:2]:
            self.ended.append(Ended(self.stretch.kind, self.stretch.began, now - self.stretch.began))
            self.stretch = Stretch(kind, self._step, now)
        self.note(Operation.BEGIN, peers=self.peers.everyone if phase in TOGETHER else NOBODY)

    def progress(self) -> None:
        """The stretch is long, but it moves: its clock starts again. For the thread that trains alone."""
        self.stretch = self.stretch._replace(began=monotonic())

    def note(self, operation: Operation, micro_batch: int | None = None, peers: tuple[int, ...] = NOBODY) -> None:
        """Notes what comes next. `peers` should be made before the run: making it costs more than the note."""
        self._ring.append((monotonic(), self._phase_number, self._step, self._phase, operation, micro_batch, peers))

    def notes(self) -> list[Note]:
        """The last notes, oldest first; there is at least one."""
        return [Note(*entry) for entry in self._ring.copy()]  # `copy` holds the interpreter: no note falls in between
