"""Cost of the data: preparing text, opening prepared data, reading samples, warm and cold.

    python -m benchmarks.data             # writes benchmarks/results/data.md
    python -m benchmarks.data --quick     # small corpora and few turns, printed only

All numbers are processor seconds, counted bytes, or ratios of processor time inside one process. What is compared runs
in turns; the table has the median over the turns and, as what this machine can tell apart, the quartiles.

- *copy*: numpy converts the same number of tokens, at places that are known, from an array in memory to int64.
- *micro-batch*: `global_batch` of 8 samples of 2,048 tokens of a corpus that is in the page cache.
- *encoder*: `encode_batch_fast` of the tokenizers library over the same texts in memory; nothing is read or written.
- *exact*, *fast*: `prepare` with one worker and each encoder, once, in a process of its own; the time of *fast* holds
  the comparison of both. The text is that of Python's standard library, then its words in random order, some made new.
- *cold*: after `posix_fadvise(DONTNEED)`; bytes from the disk as /proc/self/io counts them.
- *opening*: the index of short documents beside a sparse file of tokens, all in the page cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks.results_page import renew_page
from data_pipeline.dataset import PackedSamples
from data_pipeline.indexed import IndexedTokens, IndexedWriter
from data_pipeline.loader import BatchPlan, global_batch
from data_pipeline.meta import CorpusMeta
from data_pipeline.prepare.plan import PrepareOptions
from data_pipeline.prepare.prepare import prepare
from data_pipeline.tokenizer import python_stdlib_sources, train_tokenizer

RESULTS = Path(__file__).parent / "results" / "data.md"
LENGTH, ROWS = 2048, 8
CORPORA = 2419


class DataSizes(NamedTuple):
    """The amount that is measured."""

    tokens: int  # of the corpus that samples are read from
    documents: int  # of the index that is opened
    corpora: int
    samples: int  # of a turn
    turns: int
    text_bytes: int  # that both encoders encode


class DataCost(NamedTuple):
    """A row of the table."""

    what: str
    measured: str
    goal: str


def costs(sizes: DataSizes, folder: Path) -> Iterator[DataCost]:
    """Yields the rows as they are measured."""
    yield prepare_cost(folder, sizes.turns)
    yield from fast_encoder_costs(folder, sizes.text_bytes)
    read = write_corpus(folder / "read", sizes.tokens)
    yield cold_cost(read)
    yield from micro_batch_costs(read, sizes)
    indexed = write_index(folder / "indexed", sizes.documents)
    yield from opening_costs(indexed, sizes)
    many = [folder / f"many{number:04}" for number in range(sizes.corpora)]
    with patch("os.fsync"):
        for prefix in many:
            write_corpus(prefix, 300_000)
    yield many_corpora_cost(many)


def prepare_cost(folder: Path, turns: int) -> DataCost:
    texts = [path.read_text(encoding="utf-8") for path in python_stdlib_sources()]
    tokenizer = train_tokenizer(texts[:100], folder / "tokenizer", 8192)
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def encode() -> None:
        for first in range(0, len(texts), 64):
            encoder.encode_batch_fast(texts[first : first + 64], add_special_tokens=False)

    turn = iter(range(turns + 1))
    ratios = paired(encode, lambda: prepare([str(source)], folder / f"p{next(turn)}", tokenizer, workers=1), turns)
    return DataCost("encoder's processor time, of that of `prepare` with one worker", spread(ratios, 2), ">= 0.95")


def fast_encoder_costs(folder: Path, text_bytes: int) -> Iterator[DataCost]:
    """Uses the tokenizer that `prepare_cost` has trained."""
    written = write_distinct_text(folder / "distinct.jsonl", text_bytes)
    found = {encoder: json.loads(own_process("prepare_once", f"{folder} {encoder}")) for encoder in ("exact", "fast")}
    assert found["exact"]["sha256"] == found["fast"]["sha256"]
    ratio = found["exact"]["seconds"] / found["fast"]["seconds"]
    text = f"of {written / 1e6:,.0f} MB of text"
    yield DataCost(f"processor time {text}, exact over fast", f"{ratio:.1f}", ">= 15")
    yield DataCost(
        f"peak memory of the fast encoder's process, {text}", f"{found['fast']['peak'] / 1e9:.2f} GB", "<= 2 GB"
    )


def prepare_once(folder_and_encoder: str) -> None:
    """Prints what one `prepare` took, for the process that started this one."""
    folder, _, encoder = folder_and_encoder.rpartition(" ")
    place, options = Path(folder), PrepareOptions(encoder="fast" if encoder == "fast" else "exact")
    began = time.process_time()
    made = prepare([f"{place}/distinct.jsonl"], place / encoder, place / "tokenizer", options, workers=1)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": time.process_time() - began, "peak": peak, "sha256": made.sha256}))


def write_distinct_text(path: Path, text_bytes: int) -> int:
    """Writes rows of text until they have `text_bytes`; returns their size."""
    texts = [path.read_text(encoding="utf-8") for path in python_stdlib_sources()]
    draw, written = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(itertools.cycle(texts)):
            if written >= text_bytes:
                break
            if number >= len(texts):
                words = text.split(" ")
                draw.shuffle(words)
                words[::9] = [f"{word}{draw.randrange(100_000)}" for word in words[::9]]
                text = " ".join(words)
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
    return written


def cold_cost(prefix: Path) -> DataCost:
    what = "bytes from a cold disk, per byte of a sample of 2,048 tokens"
    samples = PackedSamples([prefix], LENGTH, 0)
    for ending in (".bin", ".idx"):
        with Path(f"{prefix}{ending}").open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, count = bytes_from_disk(), 400
    for k in range(count):
        samples.sample(k)
    read = bytes_from_disk() - before
    measured = f"{read / (count * 2 * (LENGTH + 1)):.1f}" if read else "not counted by this filesystem"
    return DataCost(what, measured, "<= 4")


def micro_batch_costs(prefix: Path, sizes: DataSizes) -> Iterator[DataCost]:
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)  # warms the page cache too
    places = np.random.default_rng(0).integers(0, len(tokens) - LENGTH - 1, sizes.samples).tolist()
    row = np.empty(LENGTH + 1, dtype=np.int64)
    samples = PackedSamples([prefix], LENGTH, 0)

    def copy() -> None:
        for place in places:
            row[:] = tokens[place : place + LENGTH + 1]

    begin = itertools.count(0, sizes.samples)  # a run reads each sample once, and what was looked up before is kept

    def batches(plan: BatchPlan) -> None:
        first = next(begin)
        for consumed in range(first, first + sizes.samples, ROWS):
            global_batch(samples, plan, consumed)

    for mask, goal in ((False, "<= 15"), (True, "<= 25")):
        plan = BatchPlan(ROWS, ROWS, data_parallel_rank=0, data_parallel_size=1, document_mask=mask)
        ratios = paired(lambda plan=plan: batches(plan), copy, sizes.turns)  # type: ignore[misc]
        how = "with" if mask else "without"
        yield DataCost(f"micro-batch {how} document_mask, of a copy to int64", spread(ratios, 1), goal)


def opening_costs(prefix: Path, sizes: DataSizes) -> Iterator[DataCost]:
    """Opens the index in processes of their own, whose memory is theirs alone."""
    facts = [json.loads(own_process("open_once", str(prefix))) for _ in range(3)]
    one, both = (min(fact[name] for fact in facts) for name in ("one_s", "both_s"))
    what = f"{sizes.documents:,} documents"
    yield DataCost(f"opening {what}, one split (s)", f"{one:.2f}", "<= 0.3 for 1e8")
    yield DataCost(f"opening {what}, both splits, of one", f"{both / one:.2f}", "<= 1.2")
    kept = max(fact["anonymous_mb"] for fact in facts)
    yield DataCost(f"anonymous memory with {what} open, 2,000 samples read (MB)", f"{kept:.0f}", "<= 50 for 1e9")
    sample_us = min(fact["sample_us"] for fact in facts)
    yield DataCost(
        f"sample of {what}, in an order that meets each block of the index anew (us)", f"{sample_us:.0f}", ""
    )


def open_once(prefix: str) -> None:
    """Prints what opening costs in this process."""
    before, began = anonymous_bytes(), time.process_time()
    samples = PackedSamples([Path(prefix)], LENGTH, 0)
    one_s = time.process_time() - began
    other = samples.of_split("held_out")
    both_s = time.process_time() - began
    began = time.process_time()
    for k in range(2000):
        samples.sample(k)
    sample_us = 1e6 * (time.process_time() - began) / 2000
    other.sample(0)
    kept = (anonymous_bytes() - before) / 1e6
    print(json.dumps({"one_s": one_s, "both_s": both_s, "anonymous_mb": kept, "sample_us": sample_us}))


def many_corpora_cost(prefixes: list[Path]) -> DataCost:
    """Opens and reads many corpora in a process that may open 1,024 files."""
    seconds = own_process("open_many", str(prefixes[0].parent))
    what = f"opening {len(prefixes):,} corpora where 1,024 files may be open, and 2,000 samples of them (s)"
    return DataCost(what, f"{float(seconds):.2f}", "<= 2 to open")


def open_many(folder: str) -> None:
    """Prints what opening costs in this process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    prefixes = sorted(path.with_suffix("") for path in Path(folder).glob("many*.bin"))
    began = time.process_time()
    samples = PackedSamples(prefixes, LENGTH, 0)
    samples.of_split("held_out")
    for k in range(2000):
        samples.sample(k)
    print(time.process_time() - began)


def own_process(function: str, argument: str) -> str:
    code = f"import benchmarks.data; benchmarks.data.{function}({argument!r})"
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


def paired(one: Callable[[], Any], other: Callable[[], Any], turns: int) -> list[float]:
    """Returns the ratios of processor time of pairs of calls, after one pair that warms up."""
    ratios = []
    for turn in range(turns + 1):
        seconds = {}
        for call in (one, other) if turn % 2 else (other, one):
            began = time.process_time()
            call()
            seconds[call] = time.process_time() - began
        ratios.append(seconds[one] / seconds[other])
    return ratios[1:]


def spread(ratios: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def write_corpus(prefix: Path, tokens: int) -> Path:
    chance = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        while writer.token_count < tokens:
            lengths = chance.integers(20, 1600, 1000 if tokens > 10**6 else 400)
            ids = chance.integers(0, 32_000, int(lengths.sum())).astype(np.uint16)
            writer.append(ids, np.cumsum(lengths))
    return prefix


def write_index(prefix: Path, documents: int) -> Path:
    """Writes the index of documents of about 1,000 tokens, and a sparse file of as many tokens."""
    lengths = np.random.default_rng(0).integers(200, 1800, documents, dtype=np.int32)
    ends = 2 * np.cumsum(lengths, dtype=np.int64)
    with Path(f"{prefix}.idx").open("wb") as stream:
        header = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08"
        stream.write(header + np.array([documents, documents + 1], "<u8").tobytes())
        for array in (lengths, np.concatenate(([0], ends[:-1])), np.arange(documents + 1)):
            stream.write(array.data)
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", int(ends[-1]))
    tokens = IndexedTokens(prefix)
    facts = {"token_count": tokens.token_count, "document_count": documents, "dtype": "uint16", "vocab_size": 32_000}
    unknown = dict.fromkeys(("tokenizer_sha256", "tokenizer", "sha256", "idx_sha256", "job_sha256"), "")
    CorpusMeta(**facts, **unknown, eos_token_id=None, sources=[]).write(prefix)  # type: ignore[arg-type]
    return prefix


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def page(rows: list[DataCost], load: tuple[float, float]) -> str:
    """Returns the results page, up to what is written by hand below it."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "tokenizers", "gigatoken"))
    return "\n".join(
        [
            "# What the data costs",
            "",
            f"`python -m benchmarks.data`, {date.today()}: {model.partition(': ')[2]}, {packages}, Python "
            f"{platform.python_version()}. Load before and after: {load[0]:.1f} and {load[1]:.1f}. What is measured "
            "and how: the script's docstring.",
            "",
            "| what | measured: median (quartiles) | goal |",
            "|---|---:|---:|",
            *(f"| {row.what} | {row.measured} | {row.goal} |" for row in rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small corpora and few turns; the results page stays")
    parser.add_argument("--folder", type=Path, help="where corpora are written, 5 GB; default: a temporary folder")
    options = parser.parse_args()
    sizes = DataSizes(20_000_000, 1_000_000, 100, 400, 3, 20_000_000) if options.quick else None
    sizes = sizes or DataSizes(200_000_000, 100_000_000, CORPORA, 2000, 15, 500_000_000)
    before, rows = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for row in costs(sizes, Path(folder)):
            print(" | ".join(row), flush=True)
            rows.append(row)
    if not options.quick:
        renew_page(RESULTS, page(rows, (before, os.getloadavg()[0])))


if __name__ == "__main__":
    main()
