"""DualPipeV: DeepSeek's DualPipe (arXiv:2412.19437, section 3.2.1) folded at the middle of the model. No torch.

Every stage holds two chunks, and no weight twice. In the middle of a step each stage takes a forward through one chunk
and a whole backward through the other in turns. DeepSeek runs the two at once, so that the messages between experts of
one hide behind the computation of the other; here they are two passes, one after the other. At both ends weight
gradients fill the time until more arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

from megalite.schedules.passes import PassKind, Task, number_passes

F0, F1 = (PassKind.FORWARD, 0), (PassKind.FORWARD, 1)
B0, B1 = (PassKind.BACKWARD, 0), (PassKind.BACKWARD, 1)
I0, I1 = (PassKind.INPUT_GRADIENT, 0), (PassKind.INPUT_GRADIENT, 1)
W0, W1 = (PassKind.WEIGHT_GRADIENT, 0), (PassKind.WEIGHT_GRADIENT, 1)


def dualpipev(stages: int, stage: int, micro_batches: int) -> list[Task]:
    """Returns the passes of one stage, in order; there must be at least 2 p micro-batches."""
    after = stages - stage - 1  # stages from this one to the fold
    phases = (
        # until the first micro-batch comes back from the fold, then until its gradient comes back from the end
        repeat((F0,), 2 * after),
        repeat((F0, F1), stage + 1),
        repeat((I1, W1, F1), after),
        # both directions in turns, then without the first forwards, of which none are left
        repeat((F0, B1, F1, B0), micro_batches - 2 * stages + stage + 1),
        repeat((B1, F1, B0), after),
    )
    return number_passes(chain(chain.from_iterable(chain.from_iterable(phases)), _end(stage, after)))


def _end(stage: int, after: int) -> Iterator[tuple[PassKind, int]]:
    """Yields the last backwards. The later half postpones weight gradients, which then fill the gaps, oldest first."""
    backwards = 2 * (stage + 1)  # of both chunks in turns, the second first
    whole = stage + 1  # half of them
    yield from ((B0, B1)[1 - number % 2] for number in range(whole))
    postponed = []
    for number in range(whole, backwards):
        chunk = 1 - number % 2
        yield (I0, I1)[chunk]
        postponed.append((W0, W1)[chunk])
    for _ in range(after):
        yield postponed.pop(0)
        yield I0
        postponed.append(W0)
    yield from postponed
