"""Encodes one chunk of text into one part file: the work that runs on all cores.

A part is an uncompressed `.npz` with `tokens` [n] and `document_ends` [documents] (exclusive positions in
`tokens`); its last tokens may belong to a document that the next part ends. A part is renamed to its final name
only when it is complete, so a part that exists is done.
"""

import io
import multiprocessing
import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.files import write_atomically
from data_pipeline.indexed import token_dtype
from data_pipeline.sources.pieces import TextPiece
from data_pipeline.tokenizer import TokenizerFile, load_tokenizer

if TYPE_CHECKING:
    import tokenizers


class EncodedPart(NamedTuple):
    tokens: NDArray[Any]
    document_ends: NDArray[np.int64]


class PartSize(NamedTuple):
    tokens: int
    documents: int
    characters: int


def encode_part(tokenizer: TokenizerFile, pieces: Sequence[TextPiece], end: int | None, path: Path) -> PartSize:
    """Encodes `pieces`, each document followed by the token `end`, and writes them as a part at `path`."""
    encoder = _loaded(tokenizer.path, tokenizer.sha256)
    dtype = token_dtype(tokenizer.vocab_size)
    arrays: list[NDArray[Any]] = []
    ends: list[int] = []
    token_count = 0
    for piece in pieces:
        # One text per call: a batch starts rayon's threads in every process, and is no faster on one core.
        ids = encoder.encode_batch_fast([piece.text], add_special_tokens=False)[0].ids
        if piece.ends_document and end is not None:
            ids.append(end)
        arrays.append(np.array(ids, dtype=dtype))
        token_count += len(ids)
        if piece.ends_document:
            ends.append(token_count)
    content = io.BytesIO()
    np.savez(content, tokens=np.concatenate(arrays), document_ends=np.array(ends, dtype=np.int64))
    write_atomically(path, content.getvalue())
    return PartSize(token_count, len(ends), sum(len(piece.text) for piece in pieces))


def read_part(path: Path) -> EncodedPart:
    with np.load(path, allow_pickle=False) as arrays:
        return EncodedPart(arrays["tokens"], arrays["document_ends"])


def exit_with_parent() -> None:
    """Ends this worker process when its parent is killed; otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only for worker processes"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@lru_cache(maxsize=1)
def _loaded(path: Path, sha256: str) -> "tokenizers.Tokenizer":
    """Loads a tokenizer once per process; `sha256` is in the cache key because the file at `path` may be replaced."""
    return load_tokenizer(path)
