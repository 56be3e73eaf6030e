"""Cost of the data: preparing text, opening prepared data, reading samples, warm and cold; each against its goal.

    python -m benchmarks.data             # prints the table, in less than 5 minutes on a quiet machine
    python -m benchmarks.data --write     # and writes benchmarks/results/data.md
    python -m benchmarks.data --quick     # small corpora and few turns

All numbers are processor seconds, counted bytes, or ratios of processor time inside one process, but for two ratios of
wall time: two workers of `prepare`, and waiting for data. What is compared runs in turns; the table has the median over
the turns and, as what this machine can tell apart, the quartiles. The rows about `prepare` and about a run are in
benchmarks/data_preparation.py.

- *copy*: numpy converts the same number of tokens, at places that are known, from an array in memory to int64.
- *micro-batch*: `global_batch` of 8 samples of 2,048 tokens of a corpus that is in the page cache.
- *mix*: three corpora as sources, against the three as one text.
- *encoder*: `encode_batch_fast` of the tokenizers library over the same texts in memory; nothing is read or written.
- *cold*: after `posix_fadvise(DONTNEED)`; bytes from the disk as /proc/self/io counts them.
- *opening*: the index of short documents beside a sparse file of tokens, all in the page cache. A first opening counts
  the splits and keeps the counts; later ones find them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.data_costs import DataCost, DataGoal, number, of_proc_self, own_process, paired, ratio
from benchmarks.data_preparation import preparation_costs, waiting_costs
from data_pipeline.loader import BatchPlan, global_batch
from data_pipeline.samples.best_fit import BestFitSamples
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.mix import Mix, MixedSamples, MixStage
from data_pipeline.samples.packing_plan import PackingRequest, write_plan
from data_pipeline.samples.samples import Samples
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter
from data_pipeline.storage.meta import CorpusMeta

RESULTS = harness.RESULTS / "data.md"
LENGTH, ROWS = 2048, 8
HELD_OUT = 0.01
CORPORA = 2419
COLD_SAMPLES = 400
SOURCES = ("a", "b", "c")
MOST_DOCUMENTS = 10**9  # for which memory has a goal; the index would take 20 GB


class DataSizes(NamedTuple):
    """The amount that is measured."""

    tokens: int  # of the corpora that samples are read from
    documents: int  # of the index that is opened
    corpora: int
    samples: int  # of a turn
    turns: int


def costs(sizes: DataSizes, folder: Path, *, is_quick: bool) -> Iterator[DataCost]:
    """Yields the rows as they are measured."""
    read = write_corpus(folder / "read", sizes.tokens, shortest=20, longest=1600)
    yield cold_cost(read, "bytes from a cold disk, per byte of a sample of 2,048 tokens")
    yield from micro_batch_costs(read, sizes)
    parts = [write_corpus(folder / name, sizes.tokens // 3, shortest=20, longest=1600) for name in SOURCES]
    yield from mix_costs(parts, sizes)
    short = write_corpus(folder / "short", sizes.tokens, shortest=20, longest=240)
    yield cold_cost(short, "the same of short documents, where each sample needs another part of the index")
    yield from opening_costs(write_index(folder / "indexed", sizes.documents), sizes)
    yield many_corpora_cost(folder / "many", sizes.corpora)
    yield from preparation_costs(folder, is_quick=is_quick)
    yield from waiting_costs(folder, is_quick=is_quick)


def cold_cost(prefix: Path, what: str) -> DataCost:
    samples = PackedSamples([prefix], LENGTH, 0)
    harness.drop_from_cache(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    before = of_proc_self("io", "read_bytes")
    for k in range(COLD_SAMPLES):
        samples.sample(k)
    read = of_proc_self("io", "read_bytes") - before
    if not read:
        return DataCost(what, None, "not counted by this filesystem", DataGoal(4))
    return number(what, read / (COLD_SAMPLES * 2 * (LENGTH + 1)), 1, DataGoal(4))


def micro_batch_costs(prefix: Path, sizes: DataSizes) -> Iterator[DataCost]:
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)  # warms the page cache too
    places = np.random.default_rng(0).integers(0, len(tokens) - LENGTH - 1, sizes.samples).tolist()
    row = np.empty(LENGTH + 1, dtype=np.int64)

    def copy() -> None:
        for place in places:
            row[:] = tokens[place : place + LENGTH + 1]

    corpus = IndexedTokens(prefix)
    write_plan(PackingRequest(corpus, corpus.index_digest(), LENGTH, "train", HELD_OUT))
    concat, best_fit = (packing([prefix], LENGTH, 0, "train", HELD_OUT) for packing in (PackedSamples, BestFitSamples))
    for what, samples, mask, bound in (
        ("micro-batch without document_mask", concat, False, 15),
        ("micro-batch with document_mask", concat, True, 25),
        ("micro-batch of best_fit", best_fit, True, 25),
    ):
        ratios = paired(batches(samples, sizes.samples, document_mask=mask), copy, sizes.turns)
        yield ratio(f"{what}, of a copy to int64", ratios, 1, DataGoal(bound))


def batches(samples: Samples, count: int, *, document_mask: bool) -> Callable[[], None]:
    """Returns a call that makes the micro-batches of the next `count` samples; a run reads each sample once."""
    plan = BatchPlan(ROWS, ROWS, data_parallel_rank=0, data_parallel_size=1, document_mask=document_mask)
    begins = itertools.count(0, count)

    def read() -> None:
        first = next(begins)
        for consumed in range(first, first + count, ROWS):
            global_batch(samples, plan, consumed)

    return read


def mix_costs(prefixes: list[Path], sizes: DataSizes) -> Iterator[DataCost]:
    """Yields what a mix of corpora adds to reading them as one text, and what it takes to find any sample of it."""
    mix = Mix.by_weights(SOURCES, [MixStage(0, {"a": 0.7, "b": 0.2, "c": 0.1})])
    alone, *sources = (
        PackedSamples(some, LENGTH, 0, "train", HELD_OUT) for some in (prefixes, *([prefix] for prefix in prefixes))
    )
    for samples in (alone, *sources):  # a run that has gone on for a while knows the blocks of the index
        for k in range(3 * sizes.samples):
            samples.count_valid_targets(samples.samples_per_epoch + k)
    mixed = MixedSamples(dict(zip(SOURCES, sources, strict=True)), mix)
    in_order = [batches(samples, sizes.samples, document_mask=False) for samples in (mixed, alone)]
    what = "micro-batch of a mix of three corpora, in order, of one of all three as one text"
    yield ratio(what, paired(in_order[0], in_order[1], sizes.turns), 2, DataGoal(1.1))
    numbers = np.random.default_rng(0).integers(0, 10**9, sizes.samples).tolist()
    found = []
    for _ in range(sizes.turns):
        began = time.process_time()
        for k in numbers:
            mix.place(k)
        found.append(1e6 * (time.process_time() - began) / len(numbers))
    yield ratio("source and number of a random sample of a mix (us)", found, 0, DataGoal(60))


def opening_costs(prefix: Path, sizes: DataSizes) -> Iterator[DataCost]:
    """Opens the index in processes of their own, whose memory is theirs alone."""
    what = f"{sizes.documents:,} documents"
    first, *later = (json.loads(own_process("benchmarks.data", "open_once", str(prefix))) for _ in range(4))
    yield number(f"opening {what} for the first time, which counts the splits (s)", first["one_s"], 2)
    one, both = (min(facts[name] for facts in later) for name in ("one_s", "both_s"))
    goal = DataGoal(0.3, where=" for 1e8")
    yield number(f"opening {what} on each rank from then on, one split (s)", one, 3, goal)
    yield number(f"opening {what}, both splits, of one", both / one, 2, DataGoal(1.2))
    kept = max(facts["anonymous_mb"] for facts in later)
    counts_mb = sum(path.stat().st_size for path in prefix.parent.glob(f"{prefix.name}.split-*")) / 1e6
    more = counts_mb * (MOST_DOCUMENTS / sizes.documents - 1)
    what_memory = f"anonymous memory at {MOST_DOCUMENTS:.0e} documents, both splits open, 2,000 samples read (MB)"
    text = f"{kept + more:.0f}: {kept:.0f} at {sizes.documents:.0e}, and counts in proportion"
    yield DataCost(what_memory, kept + more, text, DataGoal(50))
    sample_us = min(facts["sample_us"] for facts in later)
    yield number(f"sample of {what}, in an order that meets each block of the index anew (us)", sample_us, 0)


def open_once(prefix: str) -> None:
    """Prints what opening costs in this process."""
    before, began = of_proc_self("status", "RssAnon"), time.process_time()
    samples = PackedSamples([Path(prefix)], LENGTH, 0)
    one_s = time.process_time() - began
    other = samples.of_split("held_out")
    both_s = time.process_time() - began
    began = time.process_time()
    for k in range(2000):
        samples.sample(k)
    sample_us = 1e6 * (time.process_time() - began) / 2000
    other.sample(0)
    kept = (of_proc_self("status", "RssAnon") - before) * 1024 / 1e6
    print(json.dumps({"one_s": one_s, "both_s": both_s, "anonymous_mb": kept, "sample_us": sample_us}))


def many_corpora_cost(folder: Path, count: int) -> DataCost:
    """Opens and reads many corpora without metadata in a process that may open 1,024 files."""
    folder.mkdir()
    first = write_corpus(folder / "c0000", 30_000, shortest=20, longest=130)
    for number_of_one in range(1, count):
        for ending in (".bin", ".idx"):
            shutil.copyfile(f"{first}{ending}", folder / f"c{number_of_one:04}{ending}")
    seconds = min(float(own_process("benchmarks.data", "open_many", str(folder))) for _ in range(3))
    what = f"opening both splits of {count:,} corpora where 1,024 files may be open (s)"
    return number(what, seconds, 2, DataGoal(2, where=f" for {CORPORA:,}"))


def open_many(folder: str) -> None:
    """Prints what opening costs in this process, and reads samples of them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    prefixes = sorted(path.with_suffix("") for path in Path(folder).glob("*.bin"))
    began = time.process_time()
    samples = PackedSamples(prefixes, LENGTH, 0)
    samples.of_split("held_out")
    print(time.process_time() - began)
    for k in range(2000):
        samples.sample(k)


def write_corpus(prefix: Path, tokens: int, *, shortest: int, longest: int) -> Path:
    """Writes a corpus without metadata; its documents have `shortest` to `longest` tokens."""
    chance = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        while writer.token_count < tokens:
            lengths = chance.integers(shortest, longest, 400)
            ids = chance.integers(0, 32_000, int(lengths.sum()), dtype=np.uint16)
            writer.append(ids, np.cumsum(lengths))
    return prefix


def write_index(prefix: Path, documents: int) -> Path:
    """Writes the index of documents of about 1,000 tokens, and a sparse file of as many tokens."""
    lengths = np.random.default_rng(0).integers(200, 1800, documents, dtype=np.int32)
    ends = 2 * np.cumsum(lengths, dtype=np.int64)
    with Path(f"{prefix}.idx").open("wb") as stream:
        header = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08"
        stream.write(header + np.array([documents, documents + 1], "<u8").tobytes())
        for array in (lengths, np.zeros(1, dtype=np.int64), ends[:-1], np.arange(documents + 1)):
            stream.write(array.data)
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", int(ends[-1]))
    tokens = IndexedTokens(prefix)
    facts = {"token_count": tokens.token_count, "document_count": documents, "dtype": "uint16", "vocab_size": 32_000}
    unknown = dict.fromkeys(("tokenizer_sha256", "tokenizer", "sha256", "idx_sha256", "job_sha256"), "")
    CorpusMeta(**facts, **unknown, eos_token_id=None, sources=[]).write(prefix)  # type: ignore[arg-type]
    return prefix


def verdict(rows: list[DataCost]) -> str:
    """Returns one sentence about all goals."""
    missed = [row.what for row in rows if row.verdict == "missed"]
    met, unmeasured = (sum(row.verdict == word for row in rows) for word in ("met", "not measured"))
    return f"{met} goals are met, {len(missed)} missed, {unmeasured} not measured." + "".join(
        f" Missed: {what}." for what in missed
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small corpora and few turns")
    parser.add_argument("--write", action="store_true", help="write the results page")
    parser.add_argument("--folder", type=Path, help="where corpora are written, 4 GB; default: a temporary folder")
    options = parser.parse_args()
    sizes = DataSizes(20_000_000, 2_000_000, 100, 400, 3) if options.quick else None
    sizes = sizes or DataSizes(200_000_000, 100_000_000, CORPORA, 2000, 15)
    load, rows = harness.Load(), []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for row in costs(sizes, Path(folder), is_quick=options.quick):
            print(row, flush=True)
            rows.append(row)
    print(verdict(rows))
    if options.write:
        table = [*harness.header("what", "measured: median (quartiles)", "goal", ""), *(f"| {row} |" for row in rows)]
        facts = f"{harness.machine('numpy', 'tokenizers')}. {load} {verdict(rows)}"
        harness.renew_page(RESULTS, harness.page("What the data costs", "benchmarks.data", facts, *table))


if __name__ == "__main__":
    main()
