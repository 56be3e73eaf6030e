"""Which samples hold a document, by inversion, is what looking at every sample gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.audit.sample_contents import as_mix, content_of, readings_of
from data_pipeline.errors import DataError
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.mix import Mix, MixedSamples, MixStage
from data_pipeline.samples.order import epoch_key, index_of_permuted, permuted_range
from data_pipeline.samples.samples import Samples
from data_pipeline.storage.indexed_writer import IndexedWriter


def write(prefix: Path, lengths: list[int]) -> Path:
    import numpy as np

    with IndexedWriter(prefix, np.uint16) as writer:
        for length in lengths:
            writer.append(np.arange(length, dtype=np.uint16), np.array([length]))
    return prefix


def holds(samples: Samples, k: int, prefix: Path, document: int) -> bool:
    """Whether sample k holds the document; an empty document between two others is not in it."""
    return any(one.prefix == prefix and one.first <= document <= one.last for one in samples.documents(k))


@settings(max_examples=60)
@given(
    corpora=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=1, max_size=3),
    sequence_length=st.integers(1, 70),
    fraction=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 5),
)
def test_the_samples_of_a_document_are_those_that_name_it(
    tmp_path_factory: pytest.TempPathFactory,
    corpora: list[list[int]],
    sequence_length: int,
    fraction: float,
    seed: int,
    epoch: int,
) -> None:
    """With documents longer than a sample, of one token, empty, held out, and where the last block wraps around."""
    folder = tmp_path_factory.mktemp("audit")
    prefixes = [write(folder / str(number), lengths) for number, lengths in enumerate(corpora)]
    try:
        samples = PackedSamples(prefixes, sequence_length, seed, "train", fraction)
    except DataError:
        return  # nothing is left to train on
    of_epoch = range(epoch * samples.samples_per_epoch, (epoch + 1) * samples.samples_per_epoch)
    for prefix, lengths in zip(prefixes, corpora, strict=True):
        for document, length in enumerate(lengths):
            expected = [k for k in of_epoch if length and holds(samples, k, prefix, document)]
            assert samples.samples_of(prefix, document, epoch) == expected, (prefix, document)


def test_every_sample_is_found_by_each_of_its_documents(write_corpus: Callable[..., Path]) -> None:
    """Over a change of stages and several epochs of each source (T12)."""
    sizes = {"books": [5, 90, 3, 40], "web": [17] * 30, "code": [1, 2, 60, 0, 8] * 4}
    prefixes = {name: write_corpus([range(length) for length in lengths], name=name) for name, lengths in sizes.items()}
    sources = {name: PackedSamples([prefix], 16, 7, "train", 0.0) for name, prefix in prefixes.items()}
    stages = [MixStage(0, {"books": 1, "web": 2}), MixStage(50, {"code": 1, "books": 3})]
    samples = MixedSamples(sources, Mix.by_weights([*sources], stages))
    stop = 150
    found = {
        (name, document): readings_of(samples, prefix, document, stop)
        for name, prefix in prefixes.items()
        for document in range(len(sizes[name]))
    }
    for k in range(stop):
        content = content_of(samples, k)
        for one in content.documents:
            for document in range(one.first, one.last + 1):
                if sizes[content.source][document]:
                    readings = [reading for reading in found[content.source, document] if reading.k == k]
                    assert [(one.source, one.epoch) for one in readings] == [(content.source, content.epoch)]
    named = sum(
        bool(sizes[content.source][document])
        for content in (content_of(samples, k) for k in range(stop))
        for one in content.documents
        for document in range(one.first, one.last + 1)
    )
    assert sum(map(len, found.values())) == named


def test_one_text_is_a_source_without_a_name(write_corpus: Callable[..., Path]) -> None:
    prefix = write_corpus([range(1, 20)] * 9)
    samples = as_mix(PackedSamples([prefix], 16, 7, "train", 0.0))
    assert content_of(samples, 20).source == "" and content_of(samples, 20).epoch == 20 // samples.samples_per_epoch
    assert {one.k for one in readings_of(samples, prefix, 3, 40)} >= {
        k for k in range(40) if holds(samples, k, prefix, 3)
    }
    with pytest.raises(DataError, match="has no document 9: it has 9, numbered from 0"):
        readings_of(samples, prefix, 9, 40)


@given(size=st.integers(1, 10**12), seed=st.integers(0, 99), data=st.data())
def test_the_order_of_an_epoch_is_inverted(size: int, seed: int, data: st.DataObject) -> None:
    key, index = epoch_key(seed, 1, "content"), data.draw(st.integers(0, size - 1))
    assert index_of_permuted(*permuted_range(index, index + 1, size, key), size, key) == index
