"""The loss of best-fit batches is the mean over the tokens of the documents, each read alone by transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_pipeline.loader import IGNORED_TARGET, BatchPlan, TokenBatch, global_batch
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel
from megalite.parallel.loss import head_logits
from tests.helpers.hub_models import HubModel, disk_tensors
from tests.unit.data_pipeline.samples.test_best_fit import samples_of
from tests.unit.models.families.test_families import options_of, our_model

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 24


def packed_loss(model: SerialModel, vocab_size: int, batches: list[TokenBatch]) -> float:
    """The sum over micro-batches as a run makes it: each loss is divided by the valid targets of the global batch."""
    total = 0.0
    for batch in batches:
        tokens, targets, positions = map(torch.from_numpy, (batch.tokens, batch.targets, batch.positions))
        hidden, head = model(tokens, positions)
        logits = head_logits(hidden, head, vocab_size, TensorParallel(), None)
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
        total += float(summed) / batch.global_valid_targets
    return total


def one_off(batch: TokenBatch) -> TokenBatch:
    """A planted defect: each document but the first begins one token late."""
    assert batch.positions is not None
    return replace(batch, positions=np.pad(batch.positions, ((0, 0), (1, 0)))[:, :-1])


def over_boundaries(batch: TokenBatch) -> TokenBatch:
    """A planted defect: the last token of a document predicts the first of the next, or padding."""
    following = np.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    return replace(batch, targets=np.where(batch.targets == IGNORED_TARGET, following, batch.targets))


@torch.no_grad()
def test_packed_loss_is_the_mean_over_documents_read_alone(write_corpus: Callable[..., Path]) -> None:
    """In float64 to 1e-6, of which angles in fp32 take 1e-8; documents of one token, and one that is cut."""
    theirs = HubModel("llama", "llama").build()
    options = options_of(HubModel("llama", "llama"))
    ours = our_model(options, disk_tensors(theirs)).double()
    theirs = theirs.double()
    draw = np.random.default_rng()
    lengths = [*draw.integers(1, LENGTH + 2, 30).tolist(), LENGTH + 1, 1]
    documents = [draw.integers(1, options.vocab_size, n).tolist() for n in lengths]
    samples = samples_of([write_corpus(documents)], LENGTH)
    size = samples.samples_per_epoch
    batches = global_batch(samples, BatchPlan(size, 1, 0, 1, document_mask=True), 0)
    assert any(samples.sample(k).loss is not None for k in range(size))
    losses = [
        F.cross_entropy(theirs(torch.tensor([tokens])).logits[0, :-1], torch.tensor(tokens[1:]), reduction="none")
        for tokens in documents
        if len(tokens) > 1
    ]
    expected = float(torch.cat(losses).mean())
    assert packed_loss(ours, options.vocab_size, batches) == pytest.approx(expected, rel=1e-6)
    for defect in (one_off, over_boundaries):
        wrong = packed_loss(ours, options.vocab_size, [defect(batch) for batch in batches])
        assert wrong != pytest.approx(expected, rel=1e-4), f"{defect.__name__} would pass"
