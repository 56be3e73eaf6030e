"""Answers what a sample holds, and which samples hold a document, from the configuration of the data alone.

Nothing is recorded while a run trains: the order of an epoch is a permutation that can be inverted, and so is a mix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.samples.dataset import DocumentRange
from data_pipeline.samples.mix import Mix, MixedSamples, MixStage
from data_pipeline.samples.samples import Samples


@dataclass(frozen=True)
class DocumentReading:
    """One sample of a run that reads a given document."""

    k: int
    source: str
    epoch: int  # of the source, from 0


@dataclass(frozen=True)
class SampleContent(DocumentReading):
    """One sample of a run and the documents in it."""

    documents: Sequence[DocumentRange]


def as_mix(samples: Samples) -> MixedSamples:
    """Returns the samples as a mix; one text alone is a source without a name."""
    if isinstance(samples, MixedSamples):
        return samples
    return MixedSamples({"": samples}, Mix.by_weights([""], [MixStage(0, {"": 1})]))


def content_of(samples: MixedSamples, k: int) -> SampleContent:
    """Returns what sample k holds."""
    number, j = samples.mix.place(k)
    name = samples.mix.names[number]
    return SampleContent(k, name, j // samples.sources[name].samples_per_epoch, samples.documents(k))


def readings_of(samples: MixedSamples, prefix: Path, document: int, stop: int) -> list[DocumentReading]:
    """Returns the samples below `stop` that hold tokens of a document, in all epochs; no sample is looked at.

    Raises DataError if the corpus has no such document.
    """
    readings, counts = list[DocumentReading](), samples.mix.counts(stop)
    for number, (name, source) in enumerate(samples.sources.items()):
        for epoch in range(-(-counts[number] // source.samples_per_epoch)):
            of_epoch = source.samples_of(prefix, document, epoch)
            found = (samples.mix.sample_of(number, j) for j in of_epoch if j < counts[number])
            readings += [DocumentReading(k, name, epoch) for k in found if k is not None]
            if not of_epoch:
                break  # another source has the document, or none has
    return sorted(readings, key=lambda reading: reading.k)
