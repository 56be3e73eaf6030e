"""ZB-V (Qi 2023, 2024): two chunks per stage, no bubble where the three kinds of passes take equally long. No torch.

Qi 2023 (arXiv:2401.10241), section 6, and V-ZB in Qi 2024 (arXiv:2405.15362): the kinds are forward, input gradient and
weight gradient. The model is folded at its middle: the first stage holds the first and the last chunk, so that
gradients begin on the stage where activations begin, and every stage holds up to 2 p activations of chunks: as much as
1F1B's first stage.
"""

from __future__ import annotations

from itertools import chain, repeat

from megalite.schedules.passes import PassKind, Task, number_passes

F0, F1 = (PassKind.FORWARD, 0), (PassKind.FORWARD, 1)
I0, I1 = (PassKind.INPUT_GRADIENT, 0), (PassKind.INPUT_GRADIENT, 1)
W0, W1 = (PassKind.WEIGHT_GRADIENT, 0), (PassKind.WEIGHT_GRADIENT, 1)


def zb_v(stages: int, stage: int, micro_batches: int) -> list[Task]:
    """Returns the passes of one stage, in order.

    With fewer than 2 p - 1 micro-batches the order is that of 2 p - 1 without the ones that are missing.
    """
    after = stages - stage  # stages from this one to the fold, this one counted
    most = max(micro_batches, 2 * stages - 1)
    phases = (
        # until the first micro-batch comes back from the fold, then until its gradient comes back from the end
        repeat((F0,), 2 * after - 1),
        repeat((F1, F0), stage),
        repeat((F1, I1, W1), after),
        # one pass of each kind through each chunk, then without the first forwards, of which none are left
        repeat((F0, I0, W0, F1, I1, W1), most - 2 * stages + stage + 1),
        repeat((I0, W0, F1, I1, W1), after - 1),
        # input gradients first, for which other stages wait; weight gradients in the time until more arrive
        repeat((I0, I1), stage),
        repeat((I0, W0), after),
        repeat((W1,), stage),
        repeat((W0,), stage),
    )
    order = chain.from_iterable(chain.from_iterable(phases))
    return [task for task in number_passes(order) if task.micro_batch < micro_batches]
