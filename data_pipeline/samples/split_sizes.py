"""The tokens of each split that blocks of a corpus's documents hold, counted once and kept beside large corpora.

Counting them hashes the number of each document, which takes about a second per hundred million. So the first process
that has counted a corpus of more than a million documents writes `PREFIX.split-FRACTION.counts`: the SHA-256 of the
counts and of all that they depend on, then the counts as int64. Where it may not write, each process counts. A file
with another digest is not used, and is replaced.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.samples.order import is_held_out
from data_pipeline.storage.file_io import write_atomically
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.paths import with_ending

_RULE = "split-1"  # another name for every change of the hash or of the blocks
_FEWEST = 1 << 20  # documents of a corpus whose counts are kept; fewer are counted in 10 ms
_DIGEST_WORDS = 4
BLOCK = 1 << 8  # documents of a block of the train split: 2 KiB of the index are little beside a sample's tokens
HELD_OUT_BLOCK = 1 << 11  # documents, a multiple of the other; a sample of few held-out documents spans them anyway
_COUNTED_AT_ONCE = 1 << 14  # documents, a multiple of both; their hashes stay in the processor's cache


def counts_of(corpus: IndexedTokens, index_sha256: str, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tokens of each block of a corpus that are in the train split, and those held out: [blocks] each."""
    documents = len(corpus)
    blocks = -(-documents // BLOCK)
    words = blocks - (-documents // HELD_OUT_BLOCK)
    path = with_ending(corpus.prefix, f".split-{float(fraction)}.counts")
    facts = json.dumps([_RULE, index_sha256, documents, float(fraction), words]).encode()
    counts = _read(path, facts, words) if documents >= _FEWEST else None
    if counts is None:
        train, held_out = _count_tokens(corpus, fraction)
        whole_blocks = np.arange(0, blocks, HELD_OUT_BLOCK // BLOCK)
        counts = np.concatenate((train, np.add.reduceat(held_out, whole_blocks) if blocks else held_out))
        if documents >= _FEWEST:
            content = counts.astype("<i8")
            with suppress(OSError):  # its folder may not be written to
                write_atomically(path, _digest(facts, content) + content.tobytes())
    return counts[:blocks], counts[blocks:]


def _read(path: Path, facts: bytes, words: int) -> NDArray[np.int64] | None:
    """Returns the counts [words] that are kept in a file; None if they are not there, or others."""
    try:
        if path.stat().st_size != 8 * (_DIGEST_WORDS + words):
            return None
        content = np.fromfile(path, dtype="<i8")
    except OSError:
        return None
    digest, counts = content[:_DIGEST_WORDS], content[_DIGEST_WORDS:]
    return counts if digest.tobytes() == _digest(facts, counts) else None


def _digest(facts: bytes, counts: NDArray[np.int64]) -> bytes:
    digest = hashlib.sha256(facts)
    digest.update(counts.data)
    return digest.digest()


def _count_tokens(corpus: IndexedTokens, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tokens in each 256 documents that are in the train split, and those held out: [blocks] each."""
    blocks = -(-len(corpus) // BLOCK)
    train, held_out = np.empty(blocks, dtype=np.int64), np.empty(blocks, dtype=np.int64)
    for first in range(0, len(corpus), _COUNTED_AT_ONCE):
        stop = min(first + _COUNTED_AT_ONCE, len(corpus))
        starts = corpus.starts(first, stop)
        some = slice(first // BLOCK, -(-stop // BLOCK))
        chosen = np.flatnonzero(is_held_out(np.arange(first, stop, dtype=np.uint64), fraction))
        tokens = starts[chosen + 1] - starts[chosen]
        held_out[some] = np.bincount(chosen // BLOCK, tokens, minlength=some.stop - some.start)  # exact below 2^53
        train[some] = np.diff(starts[:-1:BLOCK], append=starts[-1]) - held_out[some]
    return train, held_out
