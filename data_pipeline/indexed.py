"""Token files in Megatron's `.bin/.idx` format, read and written bit for bit.

    PREFIX.bin   the token ids of all sequences, back to back, in one dtype
    PREFIX.idx   b"MMIDIDX\\0\\0", uint64 version = 1, uint8 dtype code, uint64 N sequences, uint64 D,
                 int32 lengths[N] (tokens), int64 pointers[N] (bytes into .bin), int64 document_indices[D]

D is the number of documents + 1: document i is made of the sequences document_indices[i] up to
document_indices[i+1]. All integers are little-endian. `IndexedWriter` makes one sequence per document, as
Megatron's `preprocess_data.py` does; `IndexedTokens` reads files with several sequences per document too.
Files written here load in Megatron.
"""

import hashlib
import os
import struct
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.files import open_anew, publish, with_ending

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequence count, document count + 1
_INTEGER_CODES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_FLOAT_CODES = {6: "float64", 7: "float32"}
_CODES = {np.dtype(kind): code for code, kind in _INTEGER_CODES.items()}
_LONGEST_DOCUMENT = 2**31 - 1  # lengths are int32
_BLOCK = 1 << 20  # documents per block while the pointers are written


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Applies Megatron's rule (`DType.optimal_dtype`): uint16 below 65500 entries, int32 from there on."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedTokens:
    """The documents of one `.bin/.idx` pair, memory-mapped. Opening it reads and checks the index once."""

    prefix: Path
    dtype: np.dtype[Any]
    document_lengths: NDArray[np.int32]  # [documents] tokens
    document_offsets: NDArray[np.int64]  # [documents] bytes into .bin, non-decreasing
    tokens: NDArray[Any]  # [token_count] every document, back to back

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        self._bin, self._idx = with_ending(self.prefix, ".bin"), with_ending(self.prefix, ".idx")
        for path in (self._bin, self._idx):
            if not path.is_file() and self.prefix.suffix in (".bin", ".idx"):
                named = self.prefix.with_suffix("")
                raise DataError(f"prepared data is named without an ending: give {named}, not {self.prefix}")
            if not path.is_file():
                start = "" if path.is_absolute() else " (relative paths start from the working directory)"
                raise DataError(
                    f"token file {path.absolute()} does not exist{start}: give the prefix of a .bin/.idx pair (without "
                    "the ending), or write one with `megalite prepare`"
                )
        self.dtype, sequences, boundaries = self._read_header()
        lengths, pointers, document_indices = self._map_index(sequences, boundaries)
        self.token_count = self._check_against_bin(lengths, pointers, document_indices)
        self.tokens = (
            np.asarray(np.memmap(self._bin, mode="r", dtype=self.dtype))
            if self.token_count
            else np.empty(0, dtype=self.dtype)
        )
        if len(lengths) == boundaries - 1 and bool(np.all(np.diff(document_indices) == 1)):
            self.document_lengths, self.document_offsets = lengths, pointers
        else:  # several sequences per document: join them
            edges = np.append(pointers, self.token_count * self.dtype.itemsize)[document_indices]
            self.document_offsets = edges[:-1]
            self.document_lengths = (np.diff(edges) // self.dtype.itemsize).astype(np.int32)

    def __len__(self) -> int:
        return len(self.document_lengths)

    def document(self, i: int) -> NDArray[Any]:
        """Returns the token ids of document i, a view into the file."""
        start = int(self.document_offsets[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.document_lengths[i])]

    def index_digest(self) -> str:
        """Returns the SHA-256 of `.idx`, which determines dtype, document boundaries and so the size of `.bin`."""
        with self._idx.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        with self._idx.open("rb") as stream:
            head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise DataError(
                f"{self._idx} is cut off inside its header ({len(head)} of {_HEADER.size} bytes): write it again"
            )
        magic, version, code, sequences, boundaries = _HEADER.unpack(head)
        if magic != MAGIC:
            raise DataError(
                f"{self._idx} is not a Megatron index (it starts with {magic!r}, not {MAGIC!r}): "
                "give the prefix of a .bin/.idx pair"
            )
        if version != VERSION:
            raise DataError(
                f"{self._idx} has index version {version}, but only version {VERSION} is known: write it again"
            )
        if code not in _INTEGER_CODES:
            found = _FLOAT_CODES.get(code, "unknown")
            raise DataError(
                f"{self._idx} has dtype code {code} ({found}), which holds no token ids: write it again as integers"
            )
        return np.dtype(_INTEGER_CODES[code]), sequences, boundaries

    def _map_index(
        self, sequences: int, boundaries: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        expected, found = _HEADER.size + 12 * sequences + 8 * boundaries, self._idx.stat().st_size
        if found != expected:
            raise DataError(
                f"{self._idx} has {found} bytes, but {sequences} sequences and {boundaries} document boundaries take "
                f"{expected}: it is truncated or damaged, write it again"
            )
        raw = np.asarray(np.memmap(self._idx, mode="r", dtype=np.uint8))[_HEADER.size :]
        lengths, rest = raw[: 4 * sequences], raw[4 * sequences :]
        return (
            lengths.view(np.int32),
            rest[: 8 * sequences].view(np.int64),
            rest[8 * sequences :].view(np.int64),
        )

    def _check_against_bin(
        self, lengths: NDArray[np.int32], pointers: NDArray[np.int64], document_indices: NDArray[np.int64]
    ) -> int:
        """Returns the number of tokens. Raises DataError if the two files contradict each other."""
        total, found = int(lengths.sum(dtype=np.int64)), self._bin.stat().st_size
        if found != total * self.dtype.itemsize:
            raise DataError(
                f"{self._bin} has {found} bytes, but its index counts {total} tokens of {self.dtype.itemsize} bytes: "
                "one of the two files is truncated or from another corpus, write them again"
            )
        ordered = len(lengths) == 0 or (
            int(lengths.min()) >= 0
            and int(pointers[0]) == 0
            and int(pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize == found
        )
        covered = (
            len(document_indices) > 0
            and int(document_indices[0]) == 0
            and int(document_indices[-1]) == len(lengths)
            and bool(np.all(np.diff(document_indices) >= 0))
        )
        if not (ordered and covered):
            raise DataError(f"{self._idx} is damaged (its lengths, pointers and documents disagree): write it again")
        return total


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
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
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
        content = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
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

            write(_HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], documents, documents + 1))
            write(lengths.astype("<i4").tobytes())
            offset = 0
            for start in range(0, documents, _BLOCK):
                ends = offset + np.cumsum(lengths[start : start + _BLOCK], dtype=np.int64) * self.dtype.itemsize
                write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
                offset = int(ends[-1])
            for start in range(0, documents + 1, _BLOCK):
                write(np.arange(start, min(start + _BLOCK, documents + 1), dtype="<i8").tobytes())
            stream.flush()
            os.fsync(stream.fileno())
