"""A loss mask moves with its tokens: what carries no loss is no target, wherever packing puts it, and counts agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.dataset import PackedSamples
from data_pipeline.errors import DataError
from data_pipeline.files import sha256_of_file
from data_pipeline.indexed import IndexedTokens, IndexedWriter
from data_pipeline.loader import IGNORED_TARGET, BatchPlan, global_batch
from data_pipeline.loss_file import LossWriter, loss_path
from data_pipeline.meta import CorpusMeta

PLAN = BatchPlan(4, 2, 0, 1, document_mask=True)


def write_masked(prefix: Path, lengths: list[int], loss: np.ndarray) -> Path:
    """Writes documents whose tokens are numbered from 1 on, so that each target tells where it is from."""
    ends = np.cumsum(lengths)
    with IndexedWriter(prefix, np.int32) as writer:
        writer.append(np.arange(1, ends[-1] + 1), ends)
    with LossWriter(prefix) as mask:
        mask.append(loss.astype(np.uint8))
    meta = CorpusMeta(
        "t", "tokenizer", 1 << 20, None, int(ends[-1]), len(lengths), "int32", writer.bin_sha256, writer.idx_sha256, [],
        "job", loss_sha256=mask.sha256,
    )  # fmt: skip
    meta.write(prefix)
    return prefix


@given(st.lists(st.integers(1, 9), min_size=2, max_size=30), st.integers(1, 13), st.booleans(), st.randoms())
@settings(max_examples=50)
def test_every_target_carries_loss_by_its_own_byte(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, document_mask: bool, random: object
) -> None:
    """Brute force: a target is valid where its token has a 1 and is no first of a document.

    A mask that is shifted by one, either way, or twice, fails; so does a count that the batch does not keep.
    """
    total = sum(lengths)
    loss = np.array([random.random() < 0.5 for _ in range(total)])  # type: ignore[attr-defined]
    prefix = write_masked(tmp_path_factory.mktemp("masked") / "chats", lengths, loss)
    firsts = {0, *np.cumsum(lengths).tolist()}
    samples = PackedSamples([prefix], length, seed=3, held_out_fraction=0, too_long="cut")
    batches = global_batch(samples, replace(PLAN, document_mask=document_mask), 0)
    valid = 0
    for batch in batches:
        for row, k in enumerate(batch.samples.tolist()):
            places = samples.sample(k).tokens[1:] - 1
            for target, place in zip(batch.targets[row].tolist(), places.tolist(), strict=True):
                carries = bool(loss[place]) and place not in firsts
                assert target == (place + 1 if carries else IGNORED_TARGET)
                valid += carries
    assert batches[0].global_valid_targets == valid


def test_two_corpora_of_which_one_has_a_mask(tmp_path: Path, write_corpus: Callable[..., Path]) -> None:
    masked = write_masked(tmp_path / "chats", [5, 5], np.zeros(10))
    text = write_corpus([[11, 12, 13, 14, 15]], dtype=np.int32)
    samples = PackedSamples([masked, text], 4, seed=0, held_out_fraction=0, too_long="cut")
    found = [batch.targets for start in (0, 4) for batch in global_batch(samples, PLAN, start)]
    assert {target for row in found for target in row.flatten().tolist()} == {IGNORED_TARGET, 12, 13, 14, 15}


def test_a_mask_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """A run on other answers' loss does not resume."""
    marks = [
        PackedSamples(
            [write_masked(tmp_path / str(n), [4, 4], np.arange(8) < n)], 3, 0, held_out_fraction=0
        ).fingerprint
        for n in (2, 3)
    ]
    assert marks[0] != marks[1]


def test_a_mask_of_other_tokens_is_refused(tmp_path: Path) -> None:
    prefix = write_masked(tmp_path / "chats", [4, 4], np.ones(8))
    path, meta = loss_path(prefix), tmp_path / "chats.meta.json"
    assert json.loads(meta.read_text())["loss_sha256"] == sha256_of_file(path)
    path.write_bytes(b"\1" * 7)
    with pytest.raises(DataError, match=r"chats.loss.bin has 7 bytes, but .*chats.bin has 8 tokens"):
        IndexedTokens(prefix)
    path.unlink()
    with pytest.raises(DataError, match=r"chats\.loss\.bin, the loss mask of the corpus, is missing"):
        PackedSamples([prefix], 3, 0)
    path.write_bytes(b"\1" * 8)
    meta.unlink()
    with pytest.raises(DataError, match=r"a loss mask that no .* names"):
        PackedSamples([prefix], 3, 0)
