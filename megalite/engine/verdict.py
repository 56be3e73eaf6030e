"""Whether a step is taken: asked on every rank when its gradients are summed and no weight has changed yet.

In: the step's loss and a judge. Out: refused or not. A loss that is not finite refuses itself, through its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Judge(Protocol):
    """Decides about steps. Every rank has one, and all must answer alike."""

    def takes(self, loss: Callable[[], float]) -> bool:
        """Whether the step is taken; its gradients are finite.

        `loss()` is the mean over the valid tokens of the global batch, the same bits on all ranks. It is collective
        and waits for the device: call it on all ranks or on none.
        """

    def examine(self) -> None:
        """Called on all ranks when a step is not taken, while its gradients still exist."""


class Verdict:
    """What a judge says about one step."""

    def __init__(self, judge: Judge | None, loss: Callable[[], float]) -> None:
        self._judge, self._loss = judge, loss
        self.refused = False  # finite, and not taken by the judge

    def refuses(self, is_not_finite: bool) -> bool:
        """Asked once per step, told what DeepSpeed found in the gradients of all ranks."""
        assert self._judge is not None
        self.refused = not is_not_finite and not self._judge.takes(self._loss)
        if is_not_finite or self.refused:
            self._judge.examine()
        return self.refused


def with_unsafe_gradient(loss: Tensor) -> Tensor:
    """The same loss; where it is not finite, neither is its gradient.

    A loss may be infinite though its gradient, softmax - one_hot, is not. Zero times it is NaN then, which reaches the
    gradients of all ranks on the usual way and needs no look at the loss, which would wait for the device.
    """
    if loss.requires_grad:
        value = loss.detach()
        loss.register_hook(lambda gradient: gradient + 0.0 * value)
    return loss
