"""The vocabulary-cut loss against torch's cross-entropy in float64, value and both gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel import loss as loss_module
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.loss import CHUNK_BYTES, CHUNK_TOKENS, IGNORED, head_logits, head_loss
from tests.helpers.rank_pool import run_ranks

RELATIVE = 2e-6  # of the largest number: fp32 logits and softmax, sums of up to 131 terms
BIG_VOCABULARY = CHUNK_BYTES["cpu"] // (4 * CHUNK_TOKENS) + 5  # chunks are CHUNK_TOKENS long from here on


@contextmanager
def expressions() -> Iterator[None]:
    """The passes that GPUs compile take the place of the CPU's, uncompiled."""
    with (
        patch.object(loss_module, "_softmax", loss_module._compiled_softmax),
        patch.object(loss_module, "fused", partial),
    ):
        yield


@pytest.fixture(autouse=True, params=["eager", "expressions"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The way from logits to their gradient."""
    if request.param == "eager":
        yield request.param
    else:
        with expressions():
            yield request.param


def problem(
    tokens: int, vocab: int, hidden: int = 6, scale: float = 1.0, ignored: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states `[2, tokens/2, hidden]` (or `[1, tokens, hidden]`), the head's weight, targets."""
    draw = torch.Generator().manual_seed(tokens * vocab)
    batch = 2 if tokens % 2 == 0 else 1
    x = torch.randn(batch, tokens // batch, hidden, generator=draw)
    weight = torch.randn(vocab, hidden, generator=draw) * scale
    targets = torch.randint(0, vocab, x.shape[:2], generator=draw)
    targets[torch.rand(targets.shape, generator=draw) < ignored] = IGNORED
    return x, weight, targets


def expected(
    x: Tensor, weight: Tensor, targets: Tensor, factor: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = capped(x @ weight.t(), softcap).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    (loss * factor).backward()
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), x.grad, weight.grad


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def assert_near(name: str, ours: Tensor, theirs: Tensor, relative: float = RELATIVE) -> None:
    difference = (ours.double() - theirs).abs().max()
    assert difference <= relative * theirs.abs().max(), f"{name}: off by {difference:.2e} of {theirs.abs().max():.2e}"


@pytest.mark.parametrize("tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 2])
@pytest.mark.parametrize("vocab", [131, BIG_VOCABULARY])
def test_chunks_sum_to_the_whole(tokens: int, vocab: int) -> None:
    x, weight, targets = problem(tokens, vocab, ignored=0.3 if tokens > 1 else 0.0)
    loss, x_grad, weight_grad = expected(x, weight, targets, 0.01)
    x.requires_grad_(), weight.requires_grad_()
    ours = head_loss(x, weight, targets, vocab, TensorParallel())
    (ours * 0.01).backward()
    assert_near("loss", ours.detach(), loss)
    # a sum over the vocabulary, which some GEMMs take term by term: a random walk of roundings, in four deviations
    # (measured up to 4e-5 of 9e-5 at 32,773, depending on the processor)
    walk = 4 * torch.finfo(torch.float32).eps * vocab**0.5
    assert_near("hidden gradient", x.grad, x_grad, max(RELATIVE, walk))  # type: ignore[arg-type]
    assert_near("weight gradient", weight.grad, weight_grad)  # type: ignore[arg-type]
    with torch.no_grad():
        assert head_loss(x, weight, targets, vocab, TensorParallel()) == ours


@pytest.mark.parametrize("tokens", [5, 2 * CHUNK_TOKENS + 2])
def test_the_loss_of_each_token_can_be_kept_and_changes_nothing(tokens: int) -> None:
    """Memory that was not empty, so that a token that nobody writes is seen."""
    x, weight, targets = problem(tokens, BIG_VOCABULARY)
    logits = (x.double() @ weight.double().t()).flatten(0, 1)
    each = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
    x.requires_grad_(), weight.requires_grad_()
    kept, plain = torch.full(targets.shape, torch.nan), head_loss(x, weight, targets, BIG_VOCABULARY, TensorParallel())
    ours = head_loss(x, weight, targets, BIG_VOCABULARY, TensorParallel(), None, False, kept)
    assert_near("loss of each token", kept, each)
    assert ours == plain and (kept[targets == IGNORED] == 0).all() and not kept.requires_grad
    gradients = [torch.autograd.grad(loss, (x, weight)) for loss in (plain, ours)]
    assert all(map(torch.equal, *gradients))


def test_logits_of_ten_thousand_do_not_overflow() -> None:
    x, weight, targets = problem(40, 131, scale=4e3)
    assert (x @ weight.t()).abs().max() > 1e4
    loss, x_grad, weight_grad = expected(x, weight, targets, 1.0)
    x.requires_grad_(), weight.requires_grad_()
    ours = head_loss(x, weight, targets, 131, TensorParallel())
    ours.backward()
    assert_near("loss", ours.detach(), loss)
    # a softmax of logits of 1e4 in fp32 knows its exponents to 1e-3 only: exp(1e4 * 6e-8 * few)
    assert torch.isfinite(x.grad).all() and torch.isfinite(weight.grad).all()  # type: ignore[arg-type]
    assert (x.grad - x_grad).abs().max() < 5e-3 * x_grad.abs().max()
    assert (weight.grad - weight_grad).abs().max() < 5e-3 * weight_grad.abs().max()


@pytest.mark.parametrize("tokens", [5, 2 * CHUNK_TOKENS + 2])
@pytest.mark.parametrize("vocab", [131, BIG_VOCABULARY])
def test_capped_logits_have_the_slope_of_the_cap(tokens: int, vocab: int) -> None:
    softcap = 3.0  # of logits up to about 8: some are flat, some are not
    x, weight, targets = problem(tokens, vocab, ignored=0.2)
    loss, x_grad, weight_grad = expected(x, weight, targets, 0.01, softcap)
    assert (loss - expected(x, weight, targets, 0.01)[0]).abs() > 0.1
    x.requires_grad_(), weight.requires_grad_()
    ours = head_loss(x, weight, targets, vocab, TensorParallel(), softcap)
    (ours * 0.01).backward()
    assert_near("loss", ours.detach(), loss)
    walk = 4 * torch.finfo(torch.float32).eps * vocab**0.5  # as in test_chunks_sum_to_the_whole
    assert_near("hidden gradient", x.grad, x_grad, max(RELATIVE, walk))  # type: ignore[arg-type]
    assert_near("weight gradient", weight.grad, weight_grad)  # type: ignore[arg-type]
    with torch.no_grad():
        assert head_loss(x, weight, targets, vocab, TensorParallel(), softcap) == ours


def test_no_valid_target_is_no_loss_and_no_gradient() -> None:
    x, weight, targets = problem(10, 131)
    targets.fill_(IGNORED)
    x.requires_grad_(), weight.requires_grad_()
    loss = head_loss(x, weight, targets, 131, TensorParallel())
    loss.backward()
    assert loss == 0.0
    assert not x.grad.any() and not weight.grad.any()  # type: ignore[union-attr]


def test_bf16_is_as_near_as_its_inputs_allow() -> None:
    x, weight, targets = problem(300, BIG_VOCABULARY)
    x, weight = x.bfloat16(), weight.bfloat16()
    loss, x_grad, weight_grad = expected(x, weight, targets, 0.01)
    x.requires_grad_(), weight.requires_grad_()
    ours = head_loss(x, weight, targets, BIG_VOCABULARY, TensorParallel())
    (ours * 0.01).backward()
    assert ours.dtype == torch.float32 and x.grad.dtype == weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    epsilon = 2**-8  # of bf16: logits are rounded once, their mean error falls with the root of the tokens
    assert abs(ours.item() / loss.item() - 1) < epsilon
    for mine, theirs in ((x.grad, x_grad), (weight.grad, weight_grad)):
        assert (mine.double() - theirs).norm() < 3 * epsilon * theirs.norm()  # type: ignore[union-attr]


def autograd_over_fp32(x: Tensor, weight: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Both gradients as torch computes them from 16-bit logits, in the format of the inputs."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = (x @ weight.t()).float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    (loss * factor).backward()
    assert x.grad is not None and weight.grad is not None
    return x.grad, weight.grad


def assert_no_worse_than_autograd(x: Tensor, weight: Tensor, targets: Tensor, factor: float, first: int = 0) -> None:
    """Both gradients of the head in fp16, the weight's from row `first`, against float64 of the same fp16 numbers."""
    x, weight = x.half().requires_grad_(), weight.half().requires_grad_()
    theirs = autograd_over_fp32(x, weight, targets, factor)
    (head_loss(x, weight, targets, len(weight), TensorParallel()) * factor).backward()
    _, *exact = expected(x.detach(), weight.detach(), targets, factor)
    assert x.grad is not None and weight.grad is not None
    for name, *gradients in zip(("hidden", "weight"), (x.grad, weight.grad), theirs, exact, strict=True):
        ours, their, truth = (each[first:] if name == "weight" else each for each in gradients)
        assert torch.isfinite(ours).all(), f"{name} at {factor:g}"
        error, their_error = ((each.double() - truth).norm() / truth.norm() for each in (ours, their))
        assert error < 1.1 * their_error + 1e-4, f"{name} at {factor:g}: {error:.1e}, autograd {their_error:.1e}"


@pytest.mark.parametrize(("tokens", "feature"), [(16384, 5.0), (4096, 20.0)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-8])
def test_a_frequent_token_overflows_fp16_only_where_a_loss_scale_helps(
    tokens: int, feature: float, scale: float
) -> None:
    """The sum of so many features of one sign is 80,000, before it is divided by the number of tokens."""
    x, weight, targets = problem(tokens, 131, hidden=8, scale=0.05, ignored=0.0)
    assert_no_worse_than_autograd(x + feature, weight, targets.fill_(7), scale / tokens)


def test_rare_tokens_of_a_large_vocabulary_keep_their_digits_in_fp16() -> None:
    """Their probabilities are 1e-5, where fp16 has six bits left, and one rounding is 2e-3."""
    x, weight, targets = problem(CHUNK_TOKENS + 9, 131_072, hidden=16, scale=0.02)
    assert_no_worse_than_autograd(
        x, weight, torch.where(targets == IGNORED, IGNORED, targets % 97), 2.0**16 / 8192, first=97
    )


def _on_ranks(rank: int, cases: list[tuple[int, float, bool, float | None]], path: str) -> list[dict[str, Any]]:
    """Per case the loss, the whole hidden gradient's slice and the weight gradient of this rank's rows."""
    with nullcontext() if path == "eager" else expressions():
        return _cases(rank, cases)


def _cases(rank: int, cases: list[tuple[int, float, bool, float | None]]) -> list[dict[str, Any]]:
    tp_size, seen = dist.get_world_size(), []
    for vocab, scale, sequence_parallel, softcap in cases:
        tp = TensorParallel(tp_size, rank, dist.group.WORLD, sequence_parallel)
        x, weight, targets = problem(24, vocab, scale=scale)
        rows = -(-vocab // tp_size)
        local = torch.zeros(rows, weight.shape[1])
        mine = weight[rank * rows : (rank + 1) * rows]
        local[: len(mine)] = mine
        if sequence_parallel:
            x = x.chunk(tp_size, dim=1)[rank].contiguous()
        x.requires_grad_(), local.requires_grad_()
        loss = head_loss(x, local, targets, vocab, tp, softcap)
        (loss * 0.01).backward()
        logits = head_logits(x.detach(), local.detach(), vocab, tp, softcap)
        seen.append({"loss": loss.detach(), "x": x.grad, "weight": local.grad, "logits": logits})
    return seen


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_cut_vocabulary_gives_the_same_loss_and_gradients(tp_size: int, path: str) -> None:
    # 131 pads the last rank; 3 and 5 leave a rank of four with nothing but padding; 4e3 makes logits of 1e4
    cases = [(vocab, 1.0, sequence, None) for vocab in (131, 128, 5, 3) for sequence in (False, True)]
    cases += [(131, 4e3, False, None), (131, 1.0, False, 3.0), (131, 1.0, True, 3.0), (5, 1.0, False, 3.0)]
    by_rank = run_ranks(_on_ranks, tp_size, cases, path)
    for index, (vocab, scale, sequence_parallel, softcap) in enumerate(cases):
        x, weight, targets = problem(24, vocab, scale=scale)
        loss, x_grad, weight_grad = expected(x, weight, targets, 0.01, softcap)
        ranks = [seen[index] for seen in by_rank]
        name = f"tp={tp_size} vocab={vocab} scale={scale} sequence_parallel={sequence_parallel} softcap={softcap}"
        for seen in ranks:
            assert_near(f"{name} loss", seen["loss"], loss)
            assert_near(f"{name} logits", seen["logits"], capped(x.double() @ weight.double().t(), softcap))
        whole = torch.cat([seen["weight"] for seen in ranks])
        assert not whole[vocab:].any(), f"{name}: padding rows got a gradient"
        if scale > 1:
            continue  # gradients at such logits: test_logits_of_ten_thousand_do_not_overflow
        assert_near(f"{name} weight gradient", whole[:vocab], weight_grad)
        if sequence_parallel:
            assert_near(f"{name} hidden gradient", torch.cat([seen["x"] for seen in ranks], dim=1), x_grad)
        else:
            for seen in ranks:
                assert_near(f"{name} hidden gradient", seen["x"], x_grad)
