"""Hand-written gradients against autograd's of the plain formula, in fp64 and in the precisions that are trained in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel import linear
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.linear import ColumnParallelLinear
from megalite.parallel.loss import IGNORED, head_loss
from megalite.parallel.norm import RMSNorm

BF16_ROUNDING = 2.0**-8  # half a unit in the last place


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_norm(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, TensorParallel()).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + draw(size, seed=1) / 4)
    return norm


def gradients(function: object, *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of its dot product with fixed numbers, which bf16 holds exactly."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)  # type: ignore[operator]
    out.backward(draw(*out.shape, seed=9, dtype=torch.bfloat16).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_rms_norm_and_its_gradient_are_torchs() -> None:
    x, norm = draw(2, 3, 7).requires_grad_(), rms_norm(7, torch.float64)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (7,), norm.weight, 1e-5), atol=1e-14, rtol=0)
    apply = lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,))  # noqa: E731
    assert torch.autograd.gradcheck(apply, (x, norm.weight.detach().clone().requires_grad_()))
    # a gradient that is not contiguous, as a cut sequence's
    assert torch.autograd.gradcheck(lambda x, w: apply(x, w).transpose(0, 1), (x, norm.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_no_worse_than_torch(dtype: torch.dtype) -> None:
    x, norm = draw(4, 16, 48, dtype=dtype), rms_norm(48, dtype)
    exact = gradients(lambda x, w: F.rms_norm(x, (48,), w, 1e-5), x.double(), norm.weight.double())
    theirs = gradients(lambda x, w: F.rms_norm(x, (48,), w, 1e-5), x, norm.weight)
    ours = gradients(lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), x, norm.weight)
    for name, want, their, our in zip(("y", "dx", "dw"), exact, theirs, ours, strict=True):
        assert (our - want).norm() <= 1.5 * (their - want).norm() + 1e-6 * want.norm(), name


@pytest.mark.parametrize("bias", [False, True])
def test_widened_linear_rounds_once(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without bf16 units: the fp32 result of the bf16 numbers, rounded to bf16, forward and backward."""
    monkeypatch.setattr(linear, "_cpu_multiplies_bf16", lambda: False)
    layer = ColumnParallelLinear(13, {"a": 5, "b": 4}, bias, TensorParallel()).bfloat16()
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed))
    x, parameters = draw(2, 3, 13, seed=5, dtype=torch.bfloat16), list(layer.parameters())
    names = [name for name, _ in layer.named_parameters()]
    ours = gradients(
        lambda x, *p: torch.func.functional_call(layer, dict(zip(names, p, strict=True)), (x,)), x, *parameters
    )
    exact = gradients(F.linear, x.double(), *(p.double() for p in parameters))
    for want, our in zip(exact, ours, strict=True):
        torch.testing.assert_close(our.double(), want, rtol=BF16_ROUNDING, atol=1e-5)
        assert our.dtype == torch.bfloat16


@pytest.mark.parametrize("emulated", [False, True])
def test_head_loss_in_bf16_is_near_the_exact_one(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_cpu_multiplies_bf16", lambda: not emulated)
    hidden, weight = draw(2, 9, 12, dtype=torch.bfloat16), draw(31, 12, seed=1, dtype=torch.bfloat16)
    targets = torch.arange(18).view(2, 9)
    targets[0, :4] = IGNORED

    def exact_loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")

    ours = gradients(lambda h, w: head_loss(h, w, targets, 31, TensorParallel()), hidden, weight)
    exact = gradients(exact_loss, hidden.double(), weight.double())
    for want, our in zip(exact[1:], ours[1:], strict=True):
        assert (our - want).norm() <= 2 * BF16_ROUNDING * want.norm()
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=BF16_ROUNDING, atol=0)
