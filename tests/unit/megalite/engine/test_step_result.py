"""The numbers of a step on their way to the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.engine.step_result import Readback, StepNumbers


def test_the_numbers_are_those_of_the_step_and_experts_are_counted_beside_them() -> None:
    usage = torch.tensor([[3.0, 5.0, 0.25], [1.0, 7.0, 0.5]], dtype=torch.float64)
    readback = Readback(torch.tensor(2.5), 1.5, torch.tensor(1.0), usage)
    assert readback.numbers == StepNumbers(2.5, 1.5, True)
    assert readback.expert_usage is not None and readback.expert_usage.equal(usage)
    assert Readback(torch.tensor(2.5), 1.5, False).expert_usage is None


@pytest.mark.parametrize("has_experts", [True, False])
def test_losses_of_sources_come_beside_them(has_experts: bool) -> None:
    usage = torch.tensor([[3.0, 5.0, 0.25]], dtype=torch.float64) if has_experts else None
    sums = torch.tensor([[0.1, 7.0], [2**53 - 1, 0.0]], dtype=torch.float64)
    readback = Readback(torch.tensor(2.5), 1.5, False, usage, sums)
    assert readback.numbers == StepNumbers(2.5, 1.5, False)
    assert readback.source_losses is not None and readback.source_losses.equal(sums), "counts are exact"
    assert (readback.expert_usage is None) if usage is None else usage.equal(readback.expert_usage)
    assert Readback(torch.tensor(2.5), 1.5, False, usage).source_losses is None


def test_a_norm_on_the_host_goes_to_the_device_of_the_loss() -> None:
    """DeepSpeed keeps the norm where its optimizer is, with offload.optimizer cpu on the host; the meta device stands
    for the GPU, whose tensors are not joined with one of the host either."""
    moved: list[bool] = []

    class Norm(Tensor):
        def to(self, *arguments: object, non_blocking: bool = False, **options: object) -> Tensor:
            moved.append(non_blocking)
            return super().to(*arguments, **options)  # type: ignore[call-overload]

    loss = torch.zeros((), device="meta")
    readback = Readback(loss, torch.tensor(1.5).as_subclass(Norm), torch.zeros((), device="meta"))
    assert readback._host.device.type == "meta" and moved == [True], "a copy that waits would hold the host up"
