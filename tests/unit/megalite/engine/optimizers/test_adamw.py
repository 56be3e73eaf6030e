"""AdamW with moments in bf16: torch's AdamW whose moments are rounded after each step, and skipped steps."""

from __future__ import annotations

import pytest
import torch

from megalite.config.sections import OptimizerConfig
from megalite.engine.optimizers import adamw
from megalite.engine.optimizers.adamw import CompactAdamW
from megalite.engine.stages import TORCH_DTYPES

STEPS, NUMBERS = 4, 1000


def _partition(start: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(start.clone())


@pytest.mark.parametrize("moments_dtype", ["fp32", "bf16"])
def test_steps_are_torchs_with_moments_rounded_after_each(moments_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces that do not divide the partition, each of which must count the same step for bias correction."""
    monkeypatch.setitem(adamw.WIDENED_AT_ONCE, "cpu", 300)
    options = OptimizerConfig.model_validate({"moments_dtype": moments_dtype, "learning_rate": 1e-2})
    start = torch.randn(NUMBERS)
    ours, theirs = _partition(start), _partition(start)
    mine = CompactAdamW([{"params": [ours], "weight_decay": 0.1}], options)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=options.betas, eps=options.eps, weight_decay=0.1)
    kept = TORCH_DTYPES[moments_dtype]
    for _ in range(STEPS):
        scale = torch.tensor(8.0)
        theirs.grad = torch.randn(NUMBERS)
        ours.grad, mine.grad_scale = theirs.grad * scale, scale
        mine.step()
        reference.step()
        for name in ("exp_avg", "exp_avg_sq"):
            moment = reference.state[theirs][name]
            moment.copy_(moment.to(kept))
            assert mine.state[ours][name].dtype is kept
            # torch's two ways differ in the last bit, which decides a rounding to bf16 here and there
            torch.testing.assert_close(
                mine.state[ours][name].float(), moment, rtol=1e-6 if kept.itemsize > 2 else 8e-3, atol=0.0
            )
    assert float(mine.state[ours]["step"]) == STEPS
    assert float((ours - theirs).detach().abs().max()) < (1e-6 if kept.itemsize > 2 else 1e-4)


def test_a_step_that_found_infinity_changes_nothing() -> None:
    ours = _partition(torch.randn(NUMBERS))
    mine = CompactAdamW(
        [{"params": [ours], "weight_decay": 0.1}], OptimizerConfig.model_validate({"moments_dtype": "bf16"})
    )
    ours.grad = torch.randn(NUMBERS)
    mine.step()
    before = [ours.detach().clone(), *(value.clone() for value in mine.state[ours].values())]
    ours.grad, mine.found_inf = torch.full((NUMBERS,), float("nan")), torch.tensor(1.0)
    mine.step()
    for now, then in zip((ours, *mine.state[ours].values()), before, strict=True):
        assert torch.equal(now, then)


def test_a_gpu_steps_in_pieces_that_keep_it_longer_than_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4M numbers, as before, the host was slower with the six kernels of a piece."""
    pieces: list[int] = []
    monkeypatch.setattr(adamw, "adamw", lambda weights, *_, **__: pieces.append(weights[0].numel()))
    monkeypatch.setitem(adamw.WIDENED_AT_ONCE, "meta", adamw.WIDENED_AT_ONCE["cuda"])
    weights = torch.nn.Parameter(torch.empty(11 << 25, device="meta"))
    weights.grad = torch.empty_like(weights)
    options = OptimizerConfig.model_validate({"moments_dtype": "bf16"})
    CompactAdamW([{"params": [weights], "weight_decay": 0.1}], options).step()
    assert pieces == [1 << 25] * 11
