"""Which documents are held out: decided by a hash of the document's number in its corpus.

The choice does not move when documents are appended or other corpora are added, and it is spread over the
whole corpus; a split at the tail would hold out whatever was written last.
"""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.indexed import IndexedTokens
from data_pipeline.order import mix64

_SALT = 0x6D6567616C697465  # "megalite"
_BLOCK = 1 << 20  # documents hashed at a time
_NONE = np.empty(0, dtype=np.int64)


def is_held_out(documents: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """[documents] True for those whose hash, seen as a number in [0, 1), is below `fraction`."""
    return mix64(mix64(documents ^ np.uint64(_SALT))) < int(fraction * 2**64)


def document_runs(
    corpus: IndexedTokens, fraction: float, *, held_out: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The documents of a split as runs of neighbours: first token and end token [runs] of each, none "
    "empty."""
    firsts, ends = [], []
    for start in range(0, len(corpus), _BLOCK):
        stop = min(start + _BLOCK, len(corpus))
        chosen = is_held_out(np.arange(start, stop, dtype=np.uint64), fraction) == held_out
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))  # where runs begin and end, in turn
        firsts.append(edges[0::2] + start)
        ends.append(edges[1::2] + start)
    begin, end = (_first_token(corpus, np.concatenate([_NONE, *documents])) for documents in (firsts, ends))
    return begin[end > begin], end[end > begin]


def _first_token(corpus: IndexedTokens, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where documents start in their corpus, counted in tokens; document len(corpus) starts at its end."""
    places = np.full(len(documents), corpus.token_count, dtype=np.int64)
    inside = documents < len(corpus)
    places[inside] = corpus.document_offsets[documents[inside]] // corpus.dtype.itemsize
    return places
