"""Counts of the head's loss: bytes that pass for a logit, and passes over the gradient of the head's weight."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.parallel import gradient_accumulation_fusion, loss
from megalite.parallel.collectives import TensorParallel

# bytes per 16-bit logit: the GEMM writes it, one pass reads it, the next reads it and writes its gradient in its place,
# and two GEMMs read that
OF_GEMMS, OF_PASSES = 6.0, 6.0
ROW_NUMBERS = 0.05  # a few numbers per row of thousands of logits


@pytest.fixture
def counted_by_inductor() -> Iterator[None]:
    torch._dynamo.reset()
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)  # inductor counts bytes only for this log
    logging.getLogger("torch._inductor.compile_fx.__inductor_metrics").propagate = False
    yield
    torch._logging.set_logs()
    torch._dynamo.reset()


@pytest.mark.slow  # starts a C++ compiler
@pytest.mark.usefixtures("counted_by_inductor")
def test_twelve_bytes_pass_for_a_logit() -> None:
    """One more kernel, or a copy in fp32, takes 4 bytes and more. Capped and padded: the longest expression."""
    tokens, rows = 96, 1536
    draw = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(tokens, 8, generator=draw).bfloat16(), torch.randn(rows, 8, generator=draw).bfloat16()
    logits, target = hidden @ weight.t(), torch.randint(0, rows - 5, (tokens,), generator=draw)
    part = loss._VocabularyPart(0, rows, rows - 5, 3.0, TensorParallel())
    expected = loss._softmax(logits.clone(), target, part, 1.0)
    ours = loss._compiled_softmax(logits, target, part, 1.0)
    per_logit = metrics.num_bytes_accessed / (tokens * rows)
    assert 0 < per_logit <= OF_PASSES + ROW_NUMBERS
    assert per_logit + OF_GEMMS <= 12 + ROW_NUMBERS
    torch.testing.assert_close(ours[0], expected[0])
    assert ours[1] is not None and expected[1] is not None
    # bf16, of which another order of operations may round the other way
    torch.testing.assert_close(ours[1].float(), expected[1].float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("vocabulary", "number_bytes"), [(128_256, 2), (151_936 // 2, 4), (50_304, 2)])
def test_a_gpu_passes_twice_over_the_gradient_of_the_head(vocabulary: int, number_bytes: int) -> None:
    tokens = loss._chunk_tokens(vocabulary, "cuda", number_bytes)
    passes = -(-8192 // tokens)
    assert passes <= (2 if number_bytes == 2 else 3)
    assert tokens % 128 == 0 and tokens * vocabulary * number_bytes <= 1 << 30


class CountedProducts(TorchDispatchMode):
    """Counts operations by name, and computes the GEMM that adds to fp32, which a CPU does not have, in its place."""

    def __init__(self, biggest: int) -> None:
        super().__init__()
        self.biggest, self.calls = biggest, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name == "aten.addmm.dtype_out":
            total, a, b, out_dtype = args
            assert kwargs["out"] is total and total.dtype == out_dtype == torch.float32 and a.dtype == b.dtype
            result = total.addmm_(a.float(), b.float())
        elif name == "aten.mm.dtype":
            result = torch.mm(args[0].float(), args[1].float())
        else:
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.numel() == self.biggest:
            self.calls[name] += 1
        return result


@pytest.mark.parametrize("adds", [True, False], ids=["adds-in-the-gemm", "adds-a-product"])
def test_the_sum_over_chunks_is_one_product_each_and_right(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of 16-bit GEMMs on a GPU, with a stand-in for the one that torch has on CUDA only."""
    monkeypatch.setattr(gradient_accumulation_fusion, "_adds_to_fp32", lambda device, dtype: adds)
    draw = torch.Generator().manual_seed(5)
    rows, width, chunks = 96, 40, 3
    deltas = [torch.randn(16, rows, generator=draw).half() for _ in range(chunks)]
    xs = [torch.randn(16, width, generator=draw).half() for _ in range(chunks)]
    total = torch.zeros(rows, width)
    with CountedProducts(rows * width) as counted:
        for delta, x in zip(deltas, xs, strict=True):
            gradient_accumulation_fusion.add_product(total, delta, x)
    exact = sum((d.double().t() @ x.double() for d, x in zip(deltas, xs, strict=True)), torch.zeros(rows, width))
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)  # fp32 sums of 48 products
    assert counted.calls["aten.addmm.dtype_out"] == (chunks if adds else 0)
    assert counted.calls["aten.add_.Tensor"] == (0 if adds else chunks)


def test_a_cpu_adds_fp32_products_in_place_and_has_no_wide_gemm() -> None:
    assert not gradient_accumulation_fusion._adds_to_fp32(torch.device("cpu"), torch.bfloat16)
    rows, width = 96, 40
    x, weight = torch.randn(1, 3 * loss.CHUNK_TOKENS, width), torch.randn(rows, width)
    x.requires_grad_(), weight.requires_grad_()
    with pytest.MonkeyPatch.context() as patch, CountedProducts(rows * width) as counted:
        patch.setattr(loss, "CHUNK_BYTES", {"cpu": 0})
        targets = torch.zeros(x.shape[:2], dtype=torch.long)
        loss.head_loss(x, weight, targets, rows, TensorParallel()).backward()
    assert counted.calls["aten.mm.default"] == 0 and counted.calls["aten.addmm.out"] == 3
    assert counted.calls["aten.add_.Tensor"] == 0
