"""The parts of a step on one rank: they add up to its wall time, because a record lasts until the next one.

In: the spans of a window and the collectives inside them. Out: seconds by part. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from megalite.monitor.steps.messages import AWAITED_SENDS, RECEPTIONS, SENDS
from megalite.monitor.steps.timeline import TimedNote
from megalite.tracing.activity import Operation, Phase
from megalite.tracing.tape import Collective

PARTS = {
    "data": "data",  # waiting for the next batch
    "collate_to_device": "copying it to the device",
    "forward": "forward",
    "backward": "backward",
    "loss": "loss",
    "tensor_collectives": "tensor collectives",
    "context_collectives": "context collectives",
    "expert_collectives": "expert collectives",
    "pipeline_wait": "waiting for a neighbour",  # that has not come to the message yet
    "pipeline_transfer": "transfer to a neighbour",
    "gradient_sync": "gradient synchronisation",
    "optimizer": "optimizer",
    "weights_sync": "weight synchronisation",
    "evaluation": "evaluation",
    "self_check": "self-check",
    "checkpoint": "checkpoint",
    "logging": "logging",
    "meeting": "meeting all ranks",
    "other": "the rest",
}
"""The parts of a step, in the order of a step, and their names in sentences."""

COMMUNICATION = (
    "tensor_collectives",
    "context_collectives",
    "expert_collectives",
    "pipeline_transfer",
    "gradient_sync",
    "weights_sync",
    "meeting",
)
"""Parts that are communication. Waiting for a neighbour is not: no faster network would shorten it."""

OWN_WORK = ("forward", "backward")
"""Parts in which a rank waits for no other one."""

OF_PHASE = {
    Phase.STARTING: "other",
    Phase.LOADING: "checkpoint",
    Phase.DATA: "data",
    Phase.EVALUATION: "evaluation",
    Phase.SELF_CHECK: "self_check",
    Phase.WRITING: "checkpoint",
    Phase.CHECKPOINT: "checkpoint",
    Phase.LOGGING: "logging",
}
OF_OPERATION = {
    Operation.COUNT_TOKENS: "loss",
    Operation.LOAD: "collate_to_device",
    Operation.FORWARD: "forward",
    Operation.BACKWARD: "backward",
    Operation.WEIGHT_GRADIENT: "backward",
    Operation.REDUCE_TIED_GRADIENTS: "gradient_sync",
    Operation.REDUCE_GRADIENTS: "gradient_sync",
    Operation.OPTIMIZER: "optimizer",
    Operation.BALANCE_EXPERTS: "optimizer",
    Operation.LOSS: "loss",
    Operation.GATHER_WEIGHTS: "weights_sync",
    Operation.UNITE_TIED_WEIGHTS: "weights_sync",
} | dict.fromkeys([*SENDS, *RECEPTIONS, *AWAITED_SENDS], "pipeline_transfer")
HOLDS_COLLECTIVES = frozenset({"forward", "backward", "optimizer", "other"})
"""Parts in whose time collectives are counted apart. In the others all is communication, or a phase of its own."""
FROM_OWNERS = ("all_gather", "broadcast")
OF_COPIES = ("data", "expert_data")  # axes between replicas, and between those with the same experts
OF_AXIS = {
    "tensor": "tensor_collectives",
    "context": "context_collectives",
    "expert": "expert_collectives",
    "pipeline": "pipeline_transfer",
    "tied": "gradient_sync",
    "all": "meeting",
}


def parts_of(spans: Iterable[TimedNote], collectives: Sequence[Collective], waited: float = 0.0) -> dict[str, float]:
    """Returns seconds by part.

    `collectives` are in the order of time; those of a training step are taken out of what they happened in. `waited`
    are the seconds of all messages that went by before the neighbour came.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    begins = [collective.began for collective in collectives]
    for span in spans:
        part = part_of(span)
        seconds[part] += span.seconds
        if part in HOLDS_COLLECTIVES and span.note.phase is Phase.STEP:
            own = span.seconds
            for index in range(bisect_left(begins, span.start), bisect_left(begins, span.end)):
                collective = collectives[index]
                inside = min(collective.seconds, span.end - collective.began, own)  # streams may overlap
                own -= inside
                seconds[part] -= inside
                of_data = "weights_sync" if collective.operation in FROM_OWNERS else "gradient_sync"
                seconds[of_data if collective.axis in OF_COPIES else OF_AXIS[collective.axis]] += inside
    waited = min(waited, seconds["pipeline_transfer"])
    seconds["pipeline_transfer"] -= waited
    seconds["pipeline_wait"] += waited
    return seconds


def part_of(span: TimedNote) -> str:
    """Returns the part that a span belongs to; messages between stages count as transfer as a whole."""
    note = span.note
    if note.phase is Phase.STEP:
        return OF_OPERATION.get(note.operation, "other")
    if note.phase is Phase.LOGGING and note.operation is Operation.MEET:
        return "meeting"
    return OF_PHASE[note.phase]


def communication_share(seconds: dict[str, float]) -> float:
    """Returns the share of a step's wall time that went into communication; parts may be missing."""
    wall = sum(seconds.values())
    return sum(seconds.get(part, 0.0) for part in COMMUNICATION) / wall if wall > 0 else 0.0
