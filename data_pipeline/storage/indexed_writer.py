"""Writes token files in Megatron's `.bin/.idx` format, bit for bit as Megatron's `preprocess_data.py` does.

`indexed.py` describes the format.
"""

import hashlib
import os
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.ownership import make_folder
from data_pipeline.storage.file_io import open_anew, publish
from data_pipeline.storage.indexed import BLOCK, HEADER, INTEGER_CODES, MAGIC, VERSION
from data_pipeline.storage.paths import with_ending

_CODES = {np.dtype(kind): code for code, kind in INTEGER_CODES.items()}
_LONGEST_DOCUMENT = 2**31 - 1  # lengths are int32


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Applies Megatron's rule (`DType.optimal_dtype`): uint16 below 65500 entries, int32 from there on."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Streams documents into a `.bin/.idx` pair; 4 bytes per document stay in memory.

    Both files are written under temporary names and renamed by `finish`, the index last: a reader finds a
    complete pair or none, and the next writer replaces the files that a killed one left. As a context manager it
    finishes on success and removes its temporary files on an exception.
    """

    def __init__(self, prefix: Path | str, dtype: np.dtype[Any] | type[np.integer[Any]]) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        if self.dtype not in _CODES:
            raise DataError(
                f"token files cannot hold {self.dtype}: use one of {', '.join(str(kind) for kind in _CODES)}"
            )
        self.token_count = 0
        self._open_document_tokens = 0  # tokens written since the last document ended
        self._lengths = array("i")
        self._digest, self._index_digest = hashlib.sha256(), hashlib.sha256()
        self._bin_temporary = with_ending(self.prefix, ".bin.tmp")
        self._idx_temporary = with_ending(self.prefix, ".idx.tmp")
        make_folder(self.prefix.parent)
        self._stream = open_anew(self._bin_temporary)

    @property
    def document_count(self) -> int:
        return len(self._lengths)

    @property
    def bin_sha256(self) -> str:
        return self._digest.hexdigest()

    @property
    def idx_sha256(self) -> str:
        """SHA-256 of the index; valid after `finish`."""
        return self._index_digest.hexdigest()

    def append(self, tokens: NDArray[Any], document_ends: NDArray[Any]) -> None:
        """Writes `tokens`; `document_ends` [ends] are the ends of documents in them (exclusive, rising).

        Tokens after the last end belong to a document that a later call ends.
        """
        limits = np.iinfo(self.dtype)
        if tokens.dtype != self.dtype and len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise DataError(
                    f"token id {wrong} does not fit the {self.dtype} of {self.prefix}.bin: choose the dtype from the "
                    "vocabulary that made the ids (token_dtype)"
                )
        content = np.ascontiguousarray(tokens, dtype=self.dtype).data
        self._stream.write(content)
        self._digest.update(content)
        self.token_count += len(tokens)
        if not len(document_ends):
            self._open_document_tokens += len(tokens)
            return
        lengths = np.diff(document_ends.astype(np.int64), prepend=-self._open_document_tokens)
        if int(lengths.max()) > _LONGEST_DOCUMENT:
            raise DataError(
                f"a document of {int(lengths.max())} tokens is too long for {self.prefix}.idx (at most "
                f"{_LONGEST_DOCUMENT}): split it into several documents"
            )
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self._open_document_tokens = len(tokens) - int(document_ends[-1])

    def finish(self) -> None:
        assert self._open_document_tokens == 0, "the last document was never ended"
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._write_index()
        idx = with_ending(self.prefix, ".idx")
        idx.unlink(missing_ok=True)  # an older index must never be seen beside the new .bin
        publish(self._bin_temporary, with_ending(self.prefix, ".bin"))
        publish(self._idx_temporary, idx)

    def abort(self) -> None:
        with suppress(OSError):  # what is still to be written has no room either
            self._stream.close()
        self._bin_temporary.unlink(missing_ok=True)
        self._idx_temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except OSError:
            self.abort()
            raise

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.intc) if self._lengths else np.empty(0, dtype=np.intc)
        documents = len(lengths)
        with open_anew(self._idx_temporary) as stream:

            def write(content: bytes) -> None:
                stream.write(content)
                self._index_digest.update(content)

            write(HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], documents, documents + 1))
            write(lengths.astype("<i4").tobytes())
            offset = 0
            for start in range(0, documents, BLOCK):
                ends = offset + np.cumsum(lengths[start : start + BLOCK], dtype=np.int64) * self.dtype.itemsize
                write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
                offset = int(ends[-1])
            for start in range(0, documents + 1, BLOCK):
                write(np.arange(start, min(start + BLOCK, documents + 1), dtype="<i8").tobytes())
            stream.flush()
            os.fsync(stream.fileno())
