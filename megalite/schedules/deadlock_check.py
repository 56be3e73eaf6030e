"""Checks that no schedule deadlocks: the programs of all stages end even if no message is buffered anywhere.

The rules are NCCL's. A stage's operations of one communicator run one at a time, in the order in which they were begun;
a send ends only together with its reception. Beginning an operation takes no time; a pass waits for the message that
it needs, a send until at most as many of the stage's earlier ones are on their way as the model has chunks
(`_await_sends` in the engine's pipeline_runtime.py), and the end of the step for everything. No torch.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Sequence

from megalite.schedules.passes import PassKind
from megalite.schedules.program import Compute, Message, MessageKind, Program, Receive, Send


class Communicators(enum.Enum):
    """Rule by which operations of a stage share a communicator."""

    # those with one source and one target. The engine's process groups (stage_messages.py) hold messages of
    # several pairs each, but none of two pairs of one stage, so what waits for what is the same
    ORDERED_PAIR = enum.auto()
    SIDE = enum.auto()  # those with earlier stages, and those with later ones: programs end with these too


Queue = tuple[int, int, int]  # the stage whose operations it holds, and with whom they are
MOST_NAMED = 4  # ranks in an error


def check_programs(programs: Sequence[Program], communicators: Communicators = Communicators.ORDERED_PAIR) -> None:
    """Raises ValueError, which names a stage, what it does and what it waits for, unless all programs end.

    A pass must also come after those of its own stage whose results it uses.
    """
    _Run(programs, communicators).check()


class _Run:
    """A run of all programs without times: whatever can go on goes on, in any order, since no choice loses anything."""

    def __init__(self, programs: Sequence[Program], communicators: Communicators) -> None:
        self.programs, self.communicators = programs, communicators
        self.done = [0] * len(programs)  # actions of each stage
        self.queues: defaultdict[Queue, deque[Receive | Send]] = defaultdict(deque)
        self.sending: list[deque[Message]] = [deque() for _ in programs]  # by stage, oldest first
        self.arrived: set[Message] = set()
        self.forwards: set[tuple[int, int]] = set()  # (position, micro-batch)
        self.gradients: set[tuple[int, int]] = set()  # of inputs
        self.last = max((a.position for program in programs for a in program if isinstance(a, Compute)), default=0)

    def check(self) -> None:
        awake = deque(range(len(self.programs)))
        while awake:
            awake.extend(self._advance(awake.popleft()))
        blocked = [stage for stage, program in enumerate(self.programs) if self.done[stage] < len(program)]
        pending = [(queue[0], operations[0]) for queue, operations in self.queues.items() if operations]
        if blocked or pending:
            waits = [self._blocked(stage) for stage in blocked] or [_pending(*each) for each in sorted(pending)]
            rest = f"; and {len(waits) - MOST_NAMED} more" if len(waits) > MOST_NAMED else ""
            raise ValueError("; ".join(waits[:MOST_NAMED]) + rest)

    def _advance(self, stage: int) -> list[int]:
        """Runs a stage until it has to wait; returns the stages whose messages have arrived."""
        program, woken = self.programs[stage], []
        while self.done[stage] < len(program):
            action = program[self.done[stage]]
            if self._must_wait(stage, action):
                break
            if isinstance(action, Compute):
                self._compute(stage, action)
            else:
                self._check_sent(stage, action)
                if isinstance(action, Send):
                    self.sending[stage].append(action.message)
                queue = self._queue(stage, action)
                self.queues[queue].append(action)
                if len(self.queues[queue]) == 1:
                    woken += self._match(queue)
            self.done[stage] += 1
        return woken

    def _must_wait(self, stage: int, action: Compute | Receive | Send) -> bool:
        if isinstance(action, Compute):
            return action.needs is not None and action.needs not in self.arrived
        if isinstance(action, Receive):
            return False
        sending = self.sending[stage]
        while sending and sending[0] in self.arrived:
            sending.popleft()
        return len(sending) > self.last + 1

    def _queue(self, stage: int, operation: Receive | Send) -> Queue:
        message = operation.message
        if self.communicators is Communicators.ORDERED_PAIR:
            return stage, message.source, message.target
        other = message.source if message.target == stage else message.target
        return stage, 0, int(other > stage)

    def _match(self, begin: Queue) -> list[int]:
        """Lets messages through whose send and reception are both the first of their queues."""
        woken, changed = [], [begin]
        while changed:
            key = changed.pop()
            queue = self.queues[key]
            while queue:
                mine, (stage, _, _) = queue[0], key
                message = mine.message
                end = message.target if message.source == stage else message.source
                other_key = self._queue(end, mine)
                other = self.queues[other_key]
                if not other or type(other[0]) is type(mine) or other[0].message[1:3] != message[1:3]:
                    break
                if other[0].message != message:
                    sent, expected = (message, other[0].message)[:: 1 if isinstance(mine, Send) else -1]
                    raise ValueError(
                        f"rank {sent.source} sends {sent}, and rank {sent.target} expects {expected} of it"
                    )
                queue.popleft()
                other.popleft()
                changed.append(other_key)
                self.arrived.add(message)
                woken += [message.target, message.source]
        return woken

    def _compute(self, stage: int, work: Compute) -> None:
        """Notes a pass. Raises ValueError if a pass of the same stage that it builds on is still to come."""
        position, number = at = work.position, work.micro_batch
        if work.kind is PassKind.FORWARD:
            ready = position == 0 or work.needs is not None or (position - 1, number) in self.forwards
            self.forwards.add(at)
        elif work.kind is PassKind.WEIGHT_GRADIENT:
            ready = at in self.gradients
        else:
            inside = position == self.last or work.needs is not None or (position + 1, number) in self.gradients
            ready = inside and at in self.forwards
            self.gradients.add(at)
        if not ready:
            raise ValueError(f"rank {stage} begins {work} before the pass of its own that this one waits for")

    def _check_sent(self, stage: int, operation: Receive | Send) -> None:
        """Raises ValueError if a message is to be sent before it is computed."""
        message = operation.message
        if isinstance(operation, Receive):
            return
        if message.kind is MessageKind.ACTIVATION:
            computed = (message.position - 1, message.micro_batch) in self.forwards
        else:
            computed = (message.position + 1, message.micro_batch) in self.gradients
        if not computed:
            raise ValueError(f"rank {stage} sends {message} before it has computed it")

    def _blocked(self, stage: int) -> str:
        """Says what a stage waits for, and why it does not come."""
        work = self.programs[stage][self.done[stage]]
        if isinstance(work, Send):
            message = self.sending[stage][0]
            text = f"rank {stage} waits before sending {work.message} until rank {message.target} has {message}"
            if Receive(message) not in self.programs[message.target][: self.done[message.target]]:
                return f"{text}, which it has not begun to receive"
            return f"{text}, behind other messages"
        assert isinstance(work, Compute) and work.needs is not None
        message = work.needs
        text = f"rank {stage} waits before {work} for {message} from rank {message.source}"
        if Receive(message) not in self.programs[stage][: self.done[stage]]:
            return f"{text}, which it has not begun to receive"
        if Send(message) not in self.programs[message.source][: self.done[message.source]]:
            return f"{text}, which rank {message.source} has not begun to send"
        return f"{text}, behind other messages"


def _pending(stage: int, operation: Receive | Send) -> str:
    message = operation.message
    if isinstance(operation, Send):
        return f"rank {stage} ends its step with sending {message} to rank {message.target}, which never receives it"
    return f"rank {stage} ends its step with receiving {message} from rank {message.source}, which never sends it"
