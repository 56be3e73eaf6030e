"""What a row of a micro-batch costs, as calls of functions and reads of files: neither needs a quiet machine.

Milliseconds are in benchmarks/data.py. These counts grow when something is done per sample again that is done once per
micro-batch, or when what was looked up to count targets is looked up again to read them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from data_pipeline.loader import BatchPlan, global_batch
from data_pipeline.samples.best_fit import BestFitSamples
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.mix import Mix, MixedSamples, MixStage
from data_pipeline.samples.packing_plan import PackingRequest, write_plan
from data_pipeline.samples.samples import Samples
from data_pipeline.samples.staged import CutSamples
from data_pipeline.storage.file_io import RandomAccessFile
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter

ROWS, BATCHES, LENGTH = 8, 64, 64


@pytest.fixture
def opened(tmp_path: Path) -> dict[str, Samples]:
    """A corpus of documents of 30 to 90 tokens, in both packings, and a mix of it in two orders."""
    prefix = tmp_path / "c"
    lengths = np.random.default_rng(0).integers(30, 90, 1500)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.append(np.zeros(int(lengths.sum()), dtype=np.uint16), np.cumsum(lengths))
    corpus = IndexedTokens(prefix)
    write_plan(PackingRequest(corpus, corpus.index_digest(), LENGTH, "train", 0.0))
    concat, one, other = (PackedSamples([prefix], LENGTH, seed, held_out_fraction=0.0) for seed in range(3))
    mix = Mix.by_weights(["a", "b"], [MixStage(0, {"a": 0.7, "b": 0.3})])
    return {
        "concat": concat,
        "best_fit": BestFitSamples([prefix], LENGTH, 0, held_out_fraction=0.0),
        "mix": MixedSamples({"a": one, "b": other}, mix),
    }


def counted(function: Callable[[], Any]) -> Counter[str]:
    """Returns how often functions of data_pipeline were called, by name; calls of numpy's own are its business."""
    calls = Counter[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/data_pipeline/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    ("packing", "document_mask", "budget"),
    [("concat", False, 9.1), ("concat", True, 16.5), ("best_fit", True, 14.7), ("mix", False, 10.2)],
)
def test_a_row_takes_few_calls(opened: dict[str, Samples], packing: str, document_mask: bool, budget: float) -> None:
    samples, plan = opened[packing], BatchPlan(ROWS, ROWS, 0, 1, document_mask)

    def read(first: int) -> None:
        for consumed in range(first, first + ROWS * BATCHES, ROWS):
            global_batch(samples, plan, consumed)

    read(0)  # meets each block of the index
    calls = counted(lambda: read(ROWS * BATCHES))
    per_row = calls.total() / (ROWS * BATCHES)
    print(packing, document_mask, per_row)
    assert per_row <= budget, calls.most_common()
    assert calls["check_ids"] == 0 and 0 < calls["_permuted"] <= 8 * ROWS, "done for many rows at once"


@pytest.mark.parametrize(("packing", "reads"), [("concat", 1.2), ("best_fit", 3.5)])
def test_places_are_looked_up_once(
    opened: dict[str, Samples], monkeypatch: pytest.MonkeyPatch, packing: str, reads: float
) -> None:
    """Targets are counted, then samples are read: one read for a row of concat, for best_fit its bin and its pieces."""
    samples, plan = opened[packing], BatchPlan(ROWS, ROWS, 0, 1, document_mask=True)
    global_batch(samples, plan, 0)
    seen = Counter[str]()
    read = RandomAccessFile.read

    def noted(self: RandomAccessFile, place: int, into: np.ndarray) -> None:
        seen[self.path.suffix] += 1
        read(self, place, into)

    monkeypatch.setattr(RandomAccessFile, "read", noted)
    for consumed in range(ROWS, 50 * ROWS, ROWS):
        global_batch(samples, plan, consumed)
    assert seen.total() / (49 * ROWS) <= reads, seen


def test_a_replica_reads_its_own_samples_alone_where_they_are_cut(
    opened: dict[str, Samples], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica read the tokens of the whole global batch, to count the targets of a step of short sequences."""
    samples, replicas, parts = CutSamples(opened["concat"], 4), 4, 4
    plan = BatchPlan(ROWS * parts * replicas, ROWS, 1, replicas, document_mask=True)
    read, count = RandomAccessFile.read, 0

    def noted(self: RandomAccessFile, place: int, into: np.ndarray) -> None:
        nonlocal count
        count += self.path.suffix == ".bin"
        read(self, place, into)

    monkeypatch.setattr(RandomAccessFile, "read", noted)
    global_batch(samples, plan, 0)
    assert ROWS <= count <= 2 * ROWS, "a sample of two pieces takes two reads"
