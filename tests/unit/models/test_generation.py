"""Which token comes next: probabilities are transformers', greedy and drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megalite.parallel.collectives import TensorParallel
from models.generation import Sampling, generate
from tests.unit.models.test_attention_inputs import built, config


def of_transformers(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """`[rows, vocab]`: as its `generate` makes them from the options of these names."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.float()).softmax(dim=-1)


@pytest.mark.parametrize("top_k", [None, 1, 7, 131, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-4])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int | None, top_p: float) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    logits = 3 * torch.randn(40, 131)
    logits[::2] = logits[::2].round()  # ties
    expected = of_transformers(sampling, logits)
    assert torch.equal(sampling.probabilities(logits), expected)  # the same operations


def test_greedy_is_the_likeliest_and_draws_nothing() -> None:
    logits, generator = torch.randn(131), torch.Generator().manual_seed(3)
    before = generator.get_state()
    assert Sampling().choose(logits, generator) == int(logits.argmax())
    assert torch.equal(generator.get_state(), before)


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    """4000 draws of 6 possible tokens: each count within 5 standard deviations of what is expected."""
    sampling, logits = Sampling(0.8, top_k=6), torch.randn(50)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(50)
    for _ in range(4000):
        counts[sampling.choose(logits, generator)] += 1
    expected = 4000 * sampling.probabilities(logits)
    assert (counts > 0).sum() == 6
    assert ((counts - expected).abs() <= 5 * expected.sqrt()).all()


def test_no_token_is_generated_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a plan for every number of keys: 30 ms of the host for each token and layer."""
    attend, seen = F.scaled_dot_product_attention, []

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    model = built("auto").eval()
    for token in generate(model, config(), TensorParallel(), [1, 2, 3], lambda logits: int(logits.argmax()), most=4):
        assert 0 <= token < 37 and torch.backends.cuda.cudnn_sdp_enabled(), "the caller's own attention may be cuDNN's"
    assert seen == [False] * 12  # four passes through three layers
