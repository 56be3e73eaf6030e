"""Mixes sources into one stream of samples: sample k of the run is sample j of one source, and both follow from k.

Sample k stands at u = (multiplier * k) mod modulus, a rotation by the golden ratio, which spreads any run of numbers
evenly. The weights of the sources cut [0, modulus) into intervals, and the interval with u names the source; j is the
number of earlier samples in that interval, which two sums of floors give in logarithmic time. So there is no table, no
state and no generator of random numbers, and in n samples a source's count stays within a few of n times its weight.

A stage changes the weights from a sample on. Each source's j goes on from where it was: over a change of stages no
sample of a source is left out or repeated. Where sources have epochs instead of weights, the modulus is the number of
samples of all their epochs, so that each source is read exactly so often.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from itertools import count as integers
from math import floor, gcd, isqrt
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.samples.dataset import DocumentRange, Sample, SampleRows
from data_pipeline.samples.samples import Samples

MODULUS = 1 << 64
_AT_ONCE = 256  # samples whose places are computed together, where samples are read in order


@dataclass(frozen=True)
class MixStage:
    """Weights of the sources from a sample of the run on."""

    first_sample: int
    weights: Mapping[str, float]  # by source; a source without one is not read
    place: str = ""  # at which the config begins it, by which a resumed run knows it again
    replaced: tuple[str, ...] = ()  # places of stages that would have begun in the same step, and count no more


@dataclass(frozen=True)
class Mix:
    """A function of the sample's number: the source that it comes from, and its number there.

    Raises DataError for weights that cannot be followed.
    """

    names: tuple[str, ...]  # of the sources, sorted, so that the order in a config means nothing
    stages: tuple[MixStage, ...]  # in order; the first begins at sample 0
    modulus: int = MODULUS  # where it is the sum of the weights, the shares are exact after every `modulus` samples

    @classmethod
    def by_weights(cls, names: Sequence[str], stages: Sequence[MixStage]) -> Self:
        """Returns the mix that follows weights."""
        return cls(tuple(sorted(names)), tuple(stages))

    @classmethod
    def by_samples(cls, samples: Mapping[str, int]) -> Self:
        """Returns the mix that has read so many samples of each source when it has read all of them."""
        return cls(tuple(sorted(samples)), (MixStage(0, samples),), sum(samples.values()))

    def __post_init__(self) -> None:
        firsts = [stage.first_sample for stage in self.stages]
        assert firsts and firsts[0] == 0 and all(a < b for a, b in pairwise(firsts)), firsts
        for stage in self.stages:
            assert stage.weights.keys() <= set(self.names), stage
            if min(stage.weights.values(), default=0) < 0 or not any(stage.weights.values()):
                raise DataError(f"weights {dict(stage.weights)}: none may be negative, and one must be above 0")
        for edges, stage in zip(self._edges, self.stages, strict=True):
            for name, (low, high) in zip(self.names, pairwise(edges), strict=True):
                if low == high and stage.weights.get(name):
                    raise DataError(f"weight {stage.weights[name]:g} of {name} is too small beside the others: use 0")

    def place(self, k: int) -> tuple[int, int]:
        """Returns the source of sample k, by its place among the names, and the sample's number in that source."""
        stage, source = self.stage_of(k), self.source_of(k)
        return source, self._offsets[stage][source] + self._count(stage, source, k)

    def counts(self, stop: int) -> list[int]:
        """Returns how many of the samples [0, stop) come from each source."""
        stage = self.stage_of(max(0, stop - 1))
        return [sum(pair) for pair in zip(self._offsets[stage], self._counts(stage, stop), strict=True)]

    def sample_of(self, source: int, j: int) -> int | None:
        """Returns the sample of the run that is number j of a source; None if no stage from there on reads it."""
        begun = [
            offsets[source] + self._count(stage, source, self._firsts[stage])
            for stage, offsets in enumerate(self._offsets)
        ]
        stage = bisect_right(begun, j) - 1
        width = self._edges[stage][source + 1] - self._edges[stage][source]
        if not width:
            return None  # a later stage that reads it would have begun with j
        wanted = j - self._offsets[stage][source] + 1
        low, reach = self._firsts[stage], (j - begun[stage] + 1) * self.modulus // width + 1
        while self._count(stage, source, low + reach) < wanted:
            reach *= 2
        return low + bisect_left(range(1, reach + 1), wanted, key=lambda n: self._count(stage, source, low + n))

    def stage_of(self, k: int) -> int:
        """Returns the number of the stage of sample k."""
        return bisect_right(self._firsts, k) - 1

    def places(self, first: int, stop: int, following: NDArray[np.int64] | None = None) -> list[tuple[int, int]]:
        """Returns the places of neighbouring samples, which takes much less time than one by one.

        `following` [sources] has the number of each source's next sample, -1 where it is not known, and is brought
        forward to `stop`.
        """
        following = self.nothing_known() if following is None else following
        found = list[tuple[int, int]]()
        for stage in range(self.stage_of(first), len(self.stages)):
            end = min(stop, self._firsts[stage + 1]) if stage + 1 < len(self.stages) else stop
            sources = self._sources(stage, first, end)
            counts = np.bincount(sources, minlength=len(self.names))
            for source in np.flatnonzero((counts > 0) & (following < 0)).tolist():
                following[source] = self._offsets[stage][source] + self._count(stage, source, first)
            ranks, of_earlier_sources = np.empty_like(sources), counts.cumsum() - counts
            ranks[sources.argsort(kind="stable")] = np.arange(end - first) - of_earlier_sources.repeat(counts)
            found += zip(sources.tolist(), (following[sources] + ranks).tolist(), strict=True)
            following += np.where(following < 0, 0, counts)
            if end == stop:
                break
            first = end
        return found

    def nothing_known(self) -> NDArray[np.int64]:
        """Returns what `places` takes where the numbers of the sources' next samples are not known."""
        return np.full(len(self.names), -1)

    def _sources(self, stage: int, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the sources [stop - first] of neighbouring samples of a stage."""
        if self.modulus == MODULUS:  # integers of 64 bits wrap there
            start = np.uint64(self.multiplier * first % MODULUS)
            turns = start + np.arange(stop - first, dtype=np.uint64) * np.uint64(self.multiplier)
        else:
            turns = np.array([self.multiplier * k % self.modulus for k in range(first, stop)], dtype=np.uint64)
        # an edge at the modulus, beyond all numbers, is not counted, as 64 bits do not hold it
        edges = np.array([edge for edge in self._edges[stage][1:] if edge < self.modulus], dtype=np.uint64)
        return edges.searchsorted(turns, side="right")

    @cached_property
    def multiplier(self) -> int:
        """The number nearest to modulus / golden ratio that has no divisor in common with the modulus."""
        golden = (isqrt(5 * self.modulus**2) - self.modulus) // 2
        return next(n for step in integers() for n in (golden + step, golden - step) if gcd(n, self.modulus) == 1)

    @cached_property
    def _firsts(self) -> list[int]:
        return [stage.first_sample for stage in self.stages]

    @cached_property
    def _edges(self) -> list[list[int]]:
        """[stages][sources + 1] bounds of the sources' intervals, from 0 to the modulus."""
        edges = []
        for stage in self.stages:
            weights = [Fraction(str(stage.weights.get(name, 0))) for name in self.names]  # 0.1 is a tenth
            sums = accumulate(weights, initial=Fraction(0))
            edges.append([floor(self.modulus * each / sum(weights) + Fraction(1, 2)) for each in sums])
        return edges

    @cached_property
    def _offsets(self) -> list[list[int]]:
        """[stages][sources] what the number of a sample within its source is above the count in the stage's interval.

        It carries each source's count over the changes of stages.
        """
        begun, offsets = [0] * len(self.names), []
        for stage, first in enumerate(self._firsts):
            before = self._counts(stage, first)
            offsets.append([count - earlier for count, earlier in zip(begun, before, strict=True)])
            if stage + 1 < len(self.stages):
                until = self._counts(stage, self._firsts[stage + 1])
                begun = [offset + counted for offset, counted in zip(offsets[-1], until, strict=True)]
        return offsets

    def source_of(self, k: int) -> int:
        """Returns the source of sample k, by its place among the names."""
        return bisect_right(self._edges[self.stage_of(k)], self.multiplier * k % self.modulus) - 1

    def _count(self, stage: int, source: int, stop: int) -> int:
        """Returns how many of the samples [0, stop) lie in a source's interval of a stage."""
        low, high = self._edges[stage][source : source + 2]
        return self.count_between(low, high, stop)

    def count_between(self, low: int, high: int, stop: int) -> int:
        """Returns for how many k in [0, stop) the rotation lies in [low, high)."""
        return self._carries(stop, self.modulus - low) - self._carries(stop, self.modulus - high)

    def _counts(self, stage: int, stop: int) -> list[int]:
        carries = [self._carries(stop, self.modulus - edge) for edge in self._edges[stage]]
        return [low - high for low, high in pairwise(carries)]

    def _carries(self, stop: int, shift: int) -> int:
        return floor_sum(stop, self.modulus, self.multiplier, shift)


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Returns the sum of floor((a i + b) / m) over 0 <= i < n, as Euclid's algorithm counts points below a line."""
    total = 0
    while True:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            return total
        n, b = divmod(top, m)
        m, a = a, m


@dataclass(frozen=True)
class MixRecord:
    """A mix and the content of its sources, as a checkpoint keeps it: what has been read follows from it."""

    mix: Mix
    contents: Mapping[str, str]  # by source, as `content_id` returns them
    global_batch_size: int = 0  # with which the stages' first samples were found
    batch_stages: str = ""  # how the batch changes in the course of the run; empty: it does not

    @classmethod
    def of_one(cls, content: str) -> Self:
        """Returns the record of a run that reads one text, which has no name."""
        return cls(Mix.by_weights([""], [MixStage(0, {"": 1})]), {"": content})

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Returns the record that `facts` wrote."""
        stages = [MixStage(**stage | {"replaced": tuple(stage.get("replaced", ()))}) for stage in facts["stages"]]
        if facts["by_samples"]:
            mix = Mix.by_samples(facts["stages"][0]["weights"])
        else:
            mix = Mix.by_weights([*facts["sources"]], stages)
        return cls(mix, facts["sources"], facts["global_batch_size"], facts.get("batch_stages", ""))

    def facts(self) -> dict[str, Any]:
        """Returns the record as JSON holds it."""
        return {
            "sources": dict(self.contents),
            "by_samples": self.mix.modulus != MODULUS,
            "stages": [asdict(stage) for stage in self.mix.stages],
            "global_batch_size": self.global_batch_size,
            **({"batch_stages": self.batch_stages} if self.batch_stages else {}),
        }

    def first_difference(self, other: Self, stop: int) -> int | None:
        """Returns the first sample below `stop` that another mix reads elsewhere; None if there is none."""
        ours, theirs = self._named_contents(other), other._named_contents(self)
        bounds = sorted({0, stop, *(first for mix in (self.mix, other.mix) for first in mix._firsts if first < stop)})
        for low, high in pairwise(bounds):
            edges, other_edges = (mix._edges[mix.stage_of(low)] for mix in (self.mix, other.mix))
            if self.mix.modulus != other.mix.modulus:
                one, another = _only(edges, ours), _only(other_edges, theirs)
                if one is not None and one == another:
                    continue
                pairs = ((k, ours[self.mix.source_of(k)], theirs[other.mix.source_of(k)]) for k in range(low, high))
                if (found := next((k for k, one, another in pairs if one != another), None)) is not None:
                    return found
                continue
            differing = [
                (begin, end)
                for begin, end in pairwise(sorted({*edges, *other_edges}))
                if ours[bisect_right(edges, begin) - 1] != theirs[bisect_right(other_edges, begin) - 1]
            ]

            def differences(stop: int, intervals: list[tuple[int, int]] = differing) -> int:
                return sum(self.mix.count_between(begin, end, stop) for begin, end in intervals)

            before = differences(low)
            if differences(high) > before:
                return bisect_right(range(low + 1, high + 1), before, key=differences) + low
        return None

    def _named_contents(self, other: Self) -> list[tuple[str, str]]:
        """Returns name and content of each source; one without a name has that of the same content in `other`."""
        fingerprints = {one for record in (self, other) for one in record.contents.values() if "+" not in one}

        def comparable(content: str) -> str:
            """Leaves out a digest that the other record does not have, as that of an older run."""
            fingerprint = content.partition("+")[0]
            return fingerprint if fingerprint in fingerprints else content

        named = {comparable(content): name for name, content in other.contents.items()}
        first = other.mix.names[other.mix.source_of(0)]  # of several sources of one content, the one that was read
        named[comparable(other.contents[first])] = first
        contents = [(name, comparable(self.contents[name])) for name in self.mix.names]
        return [(name or named.get(content, ""), content) for name, content in contents]


def _only(edges: Sequence[int], contents: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Returns the source that is read alone; None if there are several."""
    read = [content for content, (low, high) in zip(contents, pairwise(edges), strict=True) if low < high]
    return read[0] if len(read) == 1 else None


def content_id(samples: Samples) -> str:
    """Returns what tells the content of a source from another's: its fingerprint, and the digest of tokens if any."""
    return f"{samples.fingerprint}+{samples.content_digest}" if samples.content_digest else samples.fingerprint


class MixedSamples:
    """The samples of a run that reads several sources in turn, as a mix says."""

    def __init__(
        self, sources: Mapping[str, Samples], mix: Mix, global_batch_size: int = 0, batch_stages: str = ""
    ) -> None:
        self.mix, self.sources = mix, {name: sources[name] for name in mix.names}
        self._in_turn = list(self.sources.values())
        first = self._in_turn[0]
        self.sequence_length, self.seed, self.split = first.sequence_length, first.seed, first.split
        self.samples_per_epoch = sum(source.samples_per_epoch for source in self._in_turn)
        self.token_count = sum(source.token_count for source in self._in_turn)
        self.vocab_size = max((size for one in self._in_turn if (size := one.vocab_size) is not None), default=None)
        self.has_loss_mask = any(source.has_loss_mask for source in self._in_turn)
        self.dtype = np.result_type(*{source.dtype for source in self._in_turn})
        self.id_limit = min(source.id_limit for source in self._in_turn)
        self.eos_token_id = next((one.eos_token_id for one in self._in_turn if one.eos_token_id is not None), None)
        contents = {name: content_id(source) for name, source in self.sources.items()}
        self.record = MixRecord(mix, contents, global_batch_size, batch_stages)
        self.content_digest = ""  # those of the sources are in the record
        facts = [
            {name: source.fingerprint for name, source in self.sources.items()},
            mix.modulus,
            [*zip(mix._firsts, mix._edges, strict=True)],
        ]
        self.fingerprint = hashlib.sha256(json.dumps(["mix-1", *facts]).encode()).hexdigest()
        self._places = lru_cache(maxsize=32)(self._find_places)
        self._walked = 0, mix.nothing_known()  # the end of the block found last, and where sources go on there

    def sample(self, k: int) -> Sample:
        """Returns sample number k >= 0 of the run."""
        source, j = self._place(k)
        return self._in_turn[source].sample(j)

    def sources_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the source of each of these samples, by its place among the names."""
        return np.array([self._places(k // _AT_ONCE)[k % _AT_ONCE][0] for k in numbers.tolist()], dtype=np.int64)

    def read_row(self, k: int, rows: SampleRows, row: int) -> None:
        """Reads sample k into a row of a micro-batch; its ids are not checked."""
        source, j = self._places(k // _AT_ONCE)[k % _AT_ONCE]
        self._in_turn[source].read_row(j, rows, row)

    def count_valid_targets(self, k: int) -> int:
        """Returns how many targets of sample k carry loss; reads no tokens."""
        source, j = self._place(k)
        return self._in_turn[source].count_valid_targets(j)

    def count_valid_targets_between(self, first: int, stop: int) -> int:
        """Returns how many targets of the samples [first, stop) carry loss; reads no tokens."""
        return sum(map(self.count_valid_targets, range(first, stop)))

    def documents(self, k: int) -> list[DocumentRange]:
        """Returns the documents that sample k holds tokens of."""
        source, j = self._place(k)
        return self._in_turn[source].documents(j)

    def samples_of(self, prefix: Path, document: int, epoch: int) -> list[int]:
        """Returns the samples of the run that read a document in an epoch of its source, in rising order."""
        found = [
            self.mix.sample_of(number, j)
            for number, source in enumerate(self._in_turn)
            for j in source.samples_of(prefix, document, epoch)
        ]
        return sorted(k for k in found if k is not None)

    def notice(self) -> str | None:
        """Returns the sources' notices for the user in one sentence, or None."""
        notices = ((name, source.notice()) for name, source in self.sources.items())
        return "; ".join(f"{name}: {notice}" for name, notice in notices if notice) or None

    def _find_places(self, block: int) -> list[tuple[int, int]]:
        """Finds the places of a block of samples. One behind the other, blocks need no sums."""
        first, (end, following) = block * _AT_ONCE, self._walked
        following = following.copy() if end == first else self.mix.nothing_known()
        places = self.mix.places(first, first + _AT_ONCE, following)
        self._walked = first + _AT_ONCE, following
        return places

    def _place(self, k: int) -> tuple[int, int]:
        return self._places(k // _AT_ONCE)[k % _AT_ONCE]
