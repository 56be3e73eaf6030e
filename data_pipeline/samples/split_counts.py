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

from data_pipeline.storage.files import with_ending, write_atomically

_RULE = "split-1"  # another name for every change of the hash or of the blocks
_FEWEST = 1 << 20  # documents of a corpus whose counts are kept; fewer are counted in 10 ms
_DIGEST_WORDS = 4


class KeptCounts:
    """The file of the counts of one corpus and held-out fraction, which has `words` of them."""

    def __init__(self, prefix: Path, index_sha256: str, documents: int, fraction: float, words: int) -> None:
        self.path = with_ending(prefix, f".split-{float(fraction)}.counts")
        self._is_large, self._words = documents >= _FEWEST, words
        self._facts = json.dumps([_RULE, index_sha256, documents, float(fraction), words]).encode()

    def read(self) -> NDArray[np.int64] | None:
        """Returns the counts [words]; None if they are not there, or others."""
        if not self._is_large:
            return None
        try:
            if self.path.stat().st_size != 8 * (_DIGEST_WORDS + self._words):
                return None
            content = np.fromfile(self.path, dtype="<i8")
        except OSError:
            return None
        digest, counts = content[:_DIGEST_WORDS], content[_DIGEST_WORDS:]
        return counts if digest.tobytes() == self._digest(counts) else None

    def write(self, counts: NDArray[np.int64]) -> None:
        """Keeps the counts [words] of a large corpus, if its folder can be written to."""
        if self._is_large:
            content = counts.astype("<i8")
            with suppress(OSError):
                write_atomically(self.path, self._digest(content) + content.tobytes())

    def _digest(self, counts: NDArray[np.int64]) -> bytes:
        digest = hashlib.sha256(self._facts)
        digest.update(counts.data)
        return digest.digest()
