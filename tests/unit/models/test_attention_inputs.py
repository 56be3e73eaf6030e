"""Attention by boundaries of documents against masks, and what is made once per micro-batch.

torch's flash attention needs a GPU. Here its documented meaning, a loop over documents, runs in its place, so that all
of our code around it does: boundaries, windows, grouped heads, gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as varlen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import models.attention as attention
import models.attention_inputs as attention_inputs
import models.attention_kernels as attention_kernels
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import BlockInput, SerialModel, make_layer
from models.attention_masks import causal_mask, count_documents, document_boundaries, made_block_mask
from models.decoder import decoder_layers
from tests.helpers.varlen_loop import varlen_by_loop

SEQ = 23
# longer and shorter than the window, documents of one token, and a row that is one document
PACKED = torch.tensor([[*range(10), 0, *range(12)], [*range(23)], [0, 0, *range(20), 0]])
WINDOWS = {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention", "sliding_attention")}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "why_not_flash", lambda device, dtype, head_dim: None)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_loop)
    return None


def config(**options: Any) -> ModelConfig:
    sizes = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 3, "head_dim": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return ModelConfig.model_validate(sizes | options)


def built(choice: Any, **options: Any) -> SerialModel:
    layers = decoder_layers(config(**options), attention=choice)
    return SerialModel(layers, TensorParallel(), lambda s, tp: make_layer(s, tp, seed=3, initializer_range=0.3))


def results(model: SerialModel, positions: Tensor | None, documents: int | None = None) -> list[Tensor]:
    tokens = torch.randint(37, (3, SEQ), generator=torch.Generator().manual_seed(1))
    hidden, _ = model(tokens, positions, documents=documents)
    hidden.backward(draw(*hidden.shape, seed=7))
    return [hidden.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@given(rows=st.integers(1, 4), seq=st.integers(1, 40), seed=st.integers(0, 10_000))
def test_boundaries_are_those_of_a_loop_over_documents(rows: int, seq: int, seed: int) -> None:
    starts = torch.rand(rows, seq, generator=torch.Generator().manual_seed(seed)) < 0.3
    positions, expected = torch.zeros(rows, seq, dtype=torch.int64), []
    for row in range(rows):
        for token in range(seq):
            if token == 0 or starts[row, token]:
                expected.append(row * seq + token)
            else:
                positions[row, token] = positions[row, token - 1] + 1
    assert int(count_documents(positions)) == len(expected)
    total, allowed = rows * seq, {1, 2, 4, 8, 16, 32, 64, 128, 256, rows * seq}
    for documents in (None, len(expected)):
        found = document_boundaries(positions, documents)
        size = len(found) - 1
        assert found.dtype == torch.int32 and size == min(size for size in allowed if size >= len(expected))
        assert found.tolist() == expected + [total] * (size + 1 - len(expected))


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("positions", [PACKED, None], ids=["documents", "rows"])
@pytest.mark.parametrize("options", [{}, WINDOWS, {"query_key_norm": "per_head"}, {"num_key_value_heads": 4}], ids=str)
def test_attention_by_boundaries_is_that_by_masks(options: dict[str, Any], positions: Tensor | None) -> None:
    documents = None if positions is None else int(count_documents(positions))
    expected = results(built("sdpa", **options), positions)
    assert apart(results(built("auto", **options), positions, documents), expected) <= 2e-5  # sums in another order


def test_torch_2_11_takes_grouped_heads_without_a_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest torch that is allowed, in whose place documents were masks over all scores."""

    def of_torch_2_11(
        *arguments: Any, return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        return varlen_by_loop(*arguments, scale=scale, window_size=window_size, enable_gqa=True)

    expected = results(built("sdpa", **WINDOWS), PACKED)
    why_not_flash = attention_kernels.why_not_flash
    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_11)
    monkeypatch.setattr(attention, "why_not_flash", lambda *_: why_not_flash(torch.device("cuda"), torch.bfloat16, 128))
    assert apart(results(built("auto", **WINDOWS), PACKED), expected) <= 2e-5


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("defect", ["boundaries", "window", "another micro-batch"])
def test_a_planted_defect_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries and windows off by one token, and boundaries of the micro-batch before."""
    boundaries, attend = attention_inputs.document_boundaries, attention_kernels.attend_to_documents

    def shifted(positions: Tensor, documents: int | None) -> Tensor:
        found = boundaries(positions, documents)
        return torch.cat((found[:1], found[1:-1] + (found[1:-1] < found[2:] - 1).int(), found[-1:]))

    def longer(q: Tensor, k: Tensor, v: Tensor, edges: Any, window: int | None, scale: float, **options: Any) -> Any:
        return attend(q, k, v, edges, None if window is None else window + 1, scale, **options)

    expected = results(built("sdpa", **WINDOWS), PACKED)
    if defect == "boundaries":
        monkeypatch.setattr(attention_inputs, "document_boundaries", shifted)
    elif defect == "window":
        monkeypatch.setattr(attention, "attend_to_documents", longer)
    else:
        stale = boundaries(PACKED.flip(0), None)
        monkeypatch.setattr(attention_inputs, "document_boundaries", lambda *_: stale)
    assert apart(results(built("auto", **WINDOWS), PACKED), expected) > 1e-3


@pytest.mark.parametrize("positions", [PACKED, None], ids=["documents", "rows"])
def test_inputs_are_made_once_per_kind_and_micro_batch(
    positions: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers of two kinds; the next micro-batch has its own."""
    made: list[Any] = []
    make = attention_inputs.attention_inputs

    def noted(kind: Any, *rest: Any) -> Any:
        made.append(kind)
        return make(kind, *rest)

    monkeypatch.setattr(attention, "attention_inputs", noted)
    model = built("auto", **WINDOWS, rope_local_base_freq=100.0)
    results(model, positions)
    assert len(made) == len(set(made)) == 2
    results(model, None if positions is None else positions.flip(0))
    assert len(made) == 4 and len(set(made)) == 2


def test_what_blocks_share_does_not_leave_their_chunk() -> None:
    """A message between stages carries hidden states, positions and sample ids alone."""
    model = built("auto")
    cut = SerialModel(model.specs[:2], TensorParallel(), lambda s, tp: model.layers[s.module_key])
    output = cut(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4).unsqueeze(0))
    assert isinstance(output, BlockInput) and output.shared is None and output.positions is not None


def test_capped_scores_of_flex_attention_are_ours() -> None:
    """FlexAttention has no gradient on a CPU: forward, without a compiler."""
    q, k, v = draw(3, 4, SEQ, 16), draw(3, 2, SEQ, 16, seed=1), draw(3, 2, SEQ, 16, seed=2)
    for window in (None, 5):
        for positions in (None, PACKED):
            block_mask = made_block_mask((3, SEQ, SEQ), window, torch.device("cpu"), positions)
            found = attention_kernels.attend_capped(q, k, v, block_mask, 2.5, 0.3, is_grouped=True)
            seen = attention_inputs._mask(SEQ, SEQ, window, torch.device("cpu"), positions)
            seen = causal_mask(SEQ, SEQ, None, torch.device("cpu")) if seen is None else seen
            scores = torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.3 / 2.5) * 2.5
            expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("is_masked", "dtype", "is_grouped"),
    [(False, torch.bfloat16, True), (True, torch.bfloat16, False), (False, torch.float32, False)],
)
def test_heads_stay_grouped_on_a_gpu_where_flash_attention_takes_them(
    is_masked: bool, dtype: torch.dtype, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device goes the way of a GPU. With grouped heads torch's memory-efficient kernel is not taken, and all
    scores are in memory. cuDNN's gradients of a mask can be NaN: pytorch#196678."""
    seen: list[tuple[bool, bool, bool]] = []

    def fused(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **_: Any) -> Tensor:
        may_be_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        seen.append((enable_gqa, q.shape != k.shape or k.shape != v.shape, may_be_cudnn))
        return torch.empty_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    model = built("sdpa").to("meta", dtype)
    tokens = torch.zeros(3, SEQ, dtype=torch.int64, device="meta")
    model(tokens, tokens if is_masked else None, documents=3)
    assert seen == [(is_grouped, is_grouped, not is_masked)] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("positions", [PACKED, None], ids=["documents", "rows"])
def test_keys_and_values_copied_for_each_query_head_are_the_grouped_ones(
    positions: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(built("sdpa"), positions)
    monkeypatch.setattr(attention.Attention, "takes_groups", lambda *_, **__: False)
    assert apart(results(built("sdpa"), positions), expected) <= 2e-5  # sums in another order


def test_each_reason_against_a_kernel_is_said() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert attention_kernels.why_not_flash(cuda, torch.bfloat16, 128) is None
    for arguments, word in (
        ((cpu, torch.bfloat16, 128), "GPU"),
        ((cuda, torch.float32, 128), "float32"),
        ((cuda, torch.float16, 264), "256"),
        ((cuda, torch.float16, 12), "8"),
    ):
        assert word in (attention_kernels.why_not_flash(*arguments) or "")
    assert attention_kernels.why_not_flex(cuda, 128) is None
    assert "GPU" in (attention_kernels.why_not_flex(cpu, 256) or "") and attention_kernels.why_not_flex(cuda, 96)


@pytest.mark.parametrize("gpu", ["H100", "A100", "L4", "ROCm"])
def test_wide_heads_go_to_flex_attention_where_its_kernel_fits(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 2B and 9B: of 148 KiB an L4, L40S, A10 and RTX 4090 have 99, and the first forward failed."""
    optin = {"H100": 232448, "A100": 166912, "L4": 101376}
    properties = SimpleNamespace(**{"shared_memory_per_block_optin": optin[gpu]} if gpu in optin else {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    attend = built("auto", attn_logit_softcapping=50.0, head_dim=256).layers["model/layers/0"].self_attn
    kernel, reason = attend.kernel(torch.device("cuda"), torch.bfloat16, is_masked=False)
    assert kernel == ("explicit" if gpu == "L4" else "flex")
    assert gpu != "L4" or "160 KiB of shared memory for heads of 256 features, and this GPU has 99" in (reason or "")
    assert attention_kernels.why_not_flex(torch.device("cuda"), 128) is None
