"""A loss mask moves with its tokens: what carries no loss is no target, wherever packing puts it, and counts agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.loader import IGNORED_TARGET, BatchPlan, global_batch
from data_pipeline.samples.best_fit import BestFitSamples
from data_pipeline.samples.corpus_checks import content_digests, matching_meta
from data_pipeline.samples.dataset import PackedSamples, TooLong
from data_pipeline.samples.packing_plan import PackingRequest, write_plan
from data_pipeline.samples.samples import Samples
from data_pipeline.storage.file_io import sha256_of_file
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter
from data_pipeline.storage.loss_file import LossWriter, loss_path
from data_pipeline.storage.meta import CorpusMeta
from tests.helpers.hub_models import HubModel, disk_tensors
from tests.unit.data_pipeline.test_best_fit_loss import packed_loss
from tests.unit.models.families.test_families import options_of, our_model

PLAN = BatchPlan(4, 2, 0, 1, document_mask=True)


def write_masked(prefix: Path, documents: Sequence[Sequence[int]], loss: Any) -> Path:
    tokens = np.concatenate([np.array(document) for document in documents])
    with IndexedWriter(prefix, np.int32) as writer:
        writer.append(tokens, np.cumsum([len(document) for document in documents]))
    with LossWriter(prefix) as mask:
        mask.append(np.asarray(loss).astype(np.uint8))
    CorpusMeta(
        "t", "tokenizer", 1 << 20, None, len(tokens), len(documents), "int32", writer.bin_sha256, writer.idx_sha256, [],
        "job", loss_sha256=mask.sha256,
    ).write(prefix)  # fmt: skip
    return prefix


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Documents whose tokens are numbered from 1 on, so that each target tells where it is from."""
    ends = np.cumsum(lengths).tolist()
    return [list(range(end - length + 1, end + 1)) for end, length in zip(ends, lengths, strict=True)]


def packed(prefix: Path, length: int, is_best_fit: bool, too_long: TooLong = "cut") -> Samples:
    if not is_best_fit:
        return PackedSamples([prefix], length, 3, held_out_fraction=0, too_long=too_long)
    corpus = IndexedTokens(prefix)
    index = content_digests([corpus], [matching_meta(corpus)])[0][-1]
    write_plan(PackingRequest(corpus, index, length, "train", 0, too_long == "skip"))
    return BestFitSamples([prefix], length, 3, held_out_fraction=0, too_long=too_long)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=30), st.integers(1, 13), st.booleans(), st.booleans(), st.randoms()
)
@settings(max_examples=50)
def test_every_target_carries_loss_by_its_own_byte(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    length: int,
    is_best_fit: bool,
    document_mask: bool,
    random: Any,
) -> None:
    """Brute force: a target is valid where its token has a 1 and follows the token before it in its document.

    A mask that is shifted by one, either way, or twice, fails; so does a count that the batch does not keep.
    """
    loss = np.array([random.random() < 0.5 for _ in range(sum(lengths))])
    prefix = write_masked(tmp_path_factory.mktemp("masked") / "chats", numbered(lengths), loss)
    firsts = {0, *np.cumsum(lengths).tolist()}
    samples = packed(prefix, length, is_best_fit)
    batches = global_batch(samples, replace(PLAN, document_mask=document_mask), 0)
    valid = 0
    for batch in batches:
        for row, k in enumerate(batch.samples.tolist()):
            tokens = samples.sample(k).tokens.tolist()
            for target, before, token in zip(batch.targets[row].tolist(), tokens, tokens[1:], strict=False):
                carries = token == before + 1 and bool(loss[token - 1]) and token - 1 not in firsts
                assert target == (token if carries else IGNORED_TARGET)
                valid += carries
    assert batches[0].global_valid_targets == valid


def test_two_corpora_of_which_one_has_a_mask(tmp_path: Path, write_corpus: Callable[..., Path]) -> None:
    masked = write_masked(tmp_path / "chats", numbered([5, 5]), np.zeros(10))
    text = write_corpus([[11, 12, 13, 14, 15]], dtype=np.int32)
    samples = PackedSamples([masked, text], 4, seed=0, held_out_fraction=0, too_long="cut")
    found = [batch.targets for start in (0, 4) for batch in global_batch(samples, PLAN, start)]
    assert {target for row in found for target in row.flatten().tolist()} == {IGNORED_TARGET, 12, 13, 14, 15}


def test_conversations_that_are_too_long_are_refused_left_out_or_cut(tmp_path: Path) -> None:
    """What fits exactly is not too long; a fingerprint tells apart what the samples do."""
    prefix = write_masked(tmp_path / "chats", numbered([5, 9, 2, 6]), np.ones(22))
    with pytest.raises(DataError, match=r"chats has 2 conversations of more than 5 tokens in its train split: raise"):
        packed(prefix, 4, True, "refuse")
    skipped, cut = packed(prefix, 4, True, "skip"), packed(prefix, 4, True, "cut")
    assert "2 conversations of the train split, of more than 5 tokens, are left out" in str(skipped.notice())
    assert "are cut" in str(cut.notice())
    tokens = {token for k in range(skipped.samples_per_epoch) for token in skipped.sample(k).tokens.tolist()}
    assert tokens == {0, *range(1, 6), 15, 16}
    enough = packed(prefix, 8, True, "refuse")
    assert len({skipped.fingerprint, cut.fingerprint, enough.fingerprint}) == 3
    with pytest.raises(DataError, match=r"choose data\.packing best_fit, or data\.too_long cut"):
        packed(prefix, 8, False, "refuse")


@torch.no_grad()
@pytest.mark.usefixtures("one_thread")
def test_packed_loss_is_the_mean_over_the_trained_tokens_of_conversations_read_alone(tmp_path: Path) -> None:
    """In float64 to 1e-6, by transformers; a planted mask that is shifted by one gives another loss."""
    theirs, options = HubModel("llama", "llama").build(), options_of(HubModel("llama", "llama"))
    ours = our_model(options, disk_tensors(theirs)).double()
    theirs = theirs.double()
    draw = np.random.default_rng()
    chats = [draw.integers(1, options.vocab_size, n).tolist() for n in [*draw.integers(2, 26, 20).tolist(), 25]]
    masks = [np.array([0, *draw.integers(0, 2, len(chat) - 1)]) for chat in chats]
    losses = []
    for chat, mask in zip(chats, masks, strict=True):
        logits = theirs(torch.tensor([chat])).logits[0, :-1]
        every = F.cross_entropy(logits, torch.tensor(chat[1:]), reduction="none")
        losses.append(every[torch.tensor(mask[1:]) == 1])
    expected = float(torch.cat(losses).mean())
    mask = np.concatenate(masks)
    for planted, is_right in ((mask, True), (np.roll(mask, 1), False), (np.roll(mask, -1), False)):
        samples = packed(write_masked(tmp_path / "chats", chats, planted), 24, True, "refuse")
        batches = global_batch(samples, BatchPlan(samples.samples_per_epoch, 1, 0, 1, document_mask=True), 0)
        found = packed_loss(ours, options.vocab_size, batches)
        assert (found == pytest.approx(expected, rel=1e-6)) is is_right


def test_a_mask_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """A run on other answers' loss does not resume."""
    prefixes = [write_masked(tmp_path / str(n), numbered([4, 4]), np.arange(8) < n) for n in (2, 3)]
    assert len({packed(prefix, 3, False).fingerprint for prefix in prefixes}) == 2


def test_a_mask_of_other_tokens_is_refused(tmp_path: Path) -> None:
    prefix = write_masked(tmp_path / "chats", numbered([4, 4]), np.ones(8))
    path, meta = loss_path(prefix), tmp_path / "chats.meta.json"
    assert json.loads(meta.read_text())["loss_sha256"] == sha256_of_file(path)
    path.write_bytes(b"\1" * 7)
    with pytest.raises(DataError, match=r"chats\.loss\.bin has 7 bytes, but there are 8 tokens in .*chats\.bin"):
        IndexedTokens(prefix)
    path.unlink()
    with pytest.raises(DataError, match=r"chats\.loss\.bin, the loss mask of the corpus, is missing"):
        packed(prefix, 3, False)
    path.write_bytes(b"\1" * 8)
    meta.unlink()
    with pytest.raises(DataError, match=r"a loss mask that no .* names"):
        packed(prefix, 3, False)
