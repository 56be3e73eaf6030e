"""Token files in Megatron's `.bin/.idx` format, as they are read.

    PREFIX.bin   the token ids of all sequences, back to back, in one dtype
    PREFIX.idx   b"MMIDIDX\\0\\0", uint64 version = 1, uint8 dtype code, uint64 N sequences, uint64 D,
                 int32 lengths[N] (tokens), int64 pointers[N] (bytes into .bin), int64 document_indices[D]

D is the number of documents + 1: document i is made of the sequences document_indices[i] up to
document_indices[i+1]. All integers are little-endian. Files with several sequences per document are read too;
`indexed_writer.py` makes one of each, as Megatron's `preprocess_data.py` does.
"""

import glob
import hashlib
import struct
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError, first_names
from data_pipeline.path_suggestions import did_you_mean
from data_pipeline.storage.file_io import RandomAccessFile, sha256_of_file
from data_pipeline.storage.loss_file import loss_path
from data_pipeline.storage.paths import with_ending

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequence count, document count + 1
INTEGER_CODES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_FLOAT_CODES = {6: "float64", 7: "float32"}
BLOCK = 1 << 18  # documents that are written or checked at once
_SAMPLED_PIECES, _SAMPLED_TOKENS = 8, 1024  # read when a corpus without metadata is opened
_Number = TypeVar("_Number", np.int32, np.int64)


class IndexedTokens:
    """The documents of one `.bin/.idx` pair. Opening it reads the header and the ends; all else is read when asked for.

    A document may be made of several sequences. Opening finds a pair whose sizes disagree; `check` finds the rest.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        self._bin, self._idx = (self._file(ending) for ending in (".bin", ".idx"))
        self.dtype, self._sequences, self._boundaries = self._read_header()
        self._width = self.dtype.itemsize
        self._pointers_at = HEADER.size + 4 * self._sequences
        self._documents_at = self._pointers_at + 8 * self._sequences
        self._check_sizes()
        self.token_count = self._bin.size // self._width
        self._loss = self._loss_mask()  # which tokens carry loss
        self.has_loss_mask = self._loss is not None
        self._has_equal_documents = False  # each document is known to be one sequence

    def __len__(self) -> int:
        return self._boundaries - 1

    def read(self, low: int, high: int) -> NDArray[Any]:
        """Returns tokens [low, high)."""
        tokens = np.empty(high - low, dtype=self.dtype)
        self.read_into(low, tokens)
        return tokens

    def read_into(self, low: int, tokens: NDArray[Any]) -> None:
        """Fills an array with the tokens from `low` on; it may be of another integer type than theirs."""
        if tokens.dtype == self.dtype:
            self._bin.read(low * self._width, tokens.data)
        else:
            tokens[:] = self.read(low, low + len(tokens))

    def read_loss(self, low: int, high: int) -> NDArray[np.bool_]:
        """Returns which of the tokens [low, high) carry loss when they are predicted: without a mask all do."""
        loss = np.ones(high - low, dtype=np.uint8)
        if self._loss is not None:
            self._loss.read(low, loss.data)
        return loss.astype(np.bool_)

    def check_document(self, i: int) -> None:
        """Raises DataError if there is no document i."""
        if not 0 <= i < len(self):
            raise DataError(f"{self.prefix} has no document {i}: it has {len(self)}, numbered from 0")

    def document(self, i: int) -> NDArray[Any]:
        """Returns the token ids of document i."""
        low, high = self.starts(i, i + 1).tolist()
        return self.read(low, high)

    def starts(self, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the first token of each document [first, stop), and the end of the last one: [stop - first + 1].

        Raises DataError if they fall or lie outside the tokens, as in a damaged index.
        """
        if self._has_equal_documents:
            starts = self._pointers(first, stop + 1)
        else:
            edges = self._read_idx(self._documents_at + 8 * first, stop - first + 1, np.int64)
            low, high = int(edges.min()), int(edges.max())
            if low < 0 or high > self._sequences:
                raise self._damaged()
            starts = self._pointers(low, high + 1)[edges - low]
        starts >>= self._width.bit_length() - 1  # bytes to tokens
        if starts[0] < 0 or starts[-1] > self.token_count or np.any(starts[1:] < starts[:-1]):
            raise self._damaged()
        return starts

    def trust(self) -> None:
        """Takes the index for one that `IndexedWriter` has written: each document is one sequence."""
        self._has_equal_documents = self._sequences == len(self)

    def check(self) -> None:
        """Reads the whole index. Raises DataError if its tables and the size of `.bin` contradict each other."""
        end = 0
        for first in range(0, self._sequences, BLOCK):
            count = min(BLOCK, self._sequences - first)
            lengths = self._read_idx(HEADER.size + 4 * first, count, np.int32)
            ends = np.cumsum(lengths, dtype=np.int64) * self._width + end
            pointers = self._pointers(first, first + count)
            if lengths.min() < 0 or pointers[0] != end or not np.array_equal(pointers[1:], ends[:-1]):
                raise self._damaged()
            end = int(ends[-1])
        before, are_equal = 0, self._sequences == len(self)
        for first in range(0, self._boundaries, BLOCK):
            edges = self._read_idx(self._documents_at + 8 * first, min(BLOCK, self._boundaries - first), np.int64)
            if edges[0] < before or np.any(edges[1:] < edges[:-1]) or (first == 0 and edges[0] != 0):
                raise self._damaged()
            are_equal = are_equal and np.array_equal(edges, np.arange(first, first + len(edges)))
            before = int(edges[-1])
        if end != self._bin.size or before != self._sequences:
            raise self._damaged()
        self._has_equal_documents = are_equal

    def index_digest(self) -> str:
        """Returns the SHA-256 of `.idx`, which determines dtype, document boundaries and so the size of `.bin`."""
        return sha256_of_file(self._idx.path)

    def sampled_digest(self) -> str:
        """Returns the SHA-256 of a few pieces of `.bin`: other tokens in documents of the same lengths show in it."""
        digest, count = hashlib.sha256(), min(_SAMPLED_TOKENS, self.token_count)
        for piece in range(_SAMPLED_PIECES):
            low = piece * (self.token_count - count) // (_SAMPLED_PIECES - 1)
            digest.update(self.read(low, low + count).data)
        return digest.hexdigest()

    def _file(self, ending: str) -> RandomAccessFile:
        path = with_ending(self.prefix, ending)
        if path.is_file():
            return RandomAccessFile(path)
        if self.prefix.suffix in (".bin", ".idx"):
            named = self.prefix.with_suffix("")
            raise DataError(f"prepared data is named without an ending: give {named}, not {self.prefix}")
        if glob.has_magic(str(self.prefix)):
            matches = sorted(name.removesuffix(".idx") for name in glob.glob(f"{self.prefix}.idx", recursive=True))
            raise DataError(
                f"{self.prefix} is a pattern, which only a path in the section data of a config may be: give prefixes, "
                f"such as {first_names(matches)}"
                if matches
                else f"no prepared data matches the pattern {self.prefix}: there is no file {path.absolute()}"
            )
        if self.prefix.is_file():
            raise DataError(
                f"{self.prefix} is a file of text, which a run does not read: `megalite prepare {self.prefix} -t "
                "TOKENIZER -o PREFIX` makes a PREFIX of it to give"
            )
        if inside := sorted(str(file.with_suffix("")) for file in self.prefix.glob("*.idx")):
            raise DataError(f"{self.prefix} is a folder of prepared data: give a prefix, such as {first_names(inside)}")
        start = "" if path.is_absolute() else " (relative paths start from the working directory)"
        raise DataError(
            f"token file {path.absolute()} does not exist{did_you_mean(self.prefix, '.idx')}{start}: give the prefix "
            "of a .bin/.idx pair (without the ending), or write one with `megalite prepare`"
        )

    def _loss_mask(self) -> RandomAccessFile | None:
        path = loss_path(self.prefix)
        if not path.is_file():
            return None
        mask = RandomAccessFile(path)
        if mask.size != self.token_count:
            raise DataError(
                f"{path} has {mask.size} bytes, but there are {self.token_count} tokens in {self._bin.path}: write "
                "both again"
            )
        return mask

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        idx = self._idx.path
        head = np.empty(min(HEADER.size, self._idx.size), dtype=np.uint8)
        self._idx.read(0, head.data)
        if len(head) < HEADER.size:
            raise DataError(f"{idx} is cut off inside its header ({len(head)} of {HEADER.size} bytes): write it again")
        magic, version, code, sequences, boundaries = HEADER.unpack(head.data)
        if magic != MAGIC:
            raise DataError(
                f"{idx} is not a Megatron index (it starts with {magic!r}, not {MAGIC!r}): "
                "give the prefix of a .bin/.idx pair"
            )
        if version != VERSION:
            raise DataError(f"{idx} has index version {version}, but only version {VERSION} is known: write it again")
        if code not in INTEGER_CODES:
            found = _FLOAT_CODES.get(code, "unknown")
            raise DataError(
                f"{idx} has dtype code {code} ({found}), which holds no token ids: write it again as integers"
            )
        expected, size = HEADER.size + 12 * sequences + 8 * boundaries, self._idx.size
        if size != expected:
            raise DataError(
                f"{idx} has {size} bytes, but {sequences} sequences and {boundaries} document boundaries take "
                f"{expected}: it is truncated or damaged, write it again"
            )
        return np.dtype(INTEGER_CODES[code]), sequences, boundaries

    def _check_sizes(self) -> None:
        """Raises DataError unless the last sequence ends where `.bin` does and the documents end with it."""
        if not self._boundaries or self._read_idx(self._idx.size - 8, 1, np.int64)[0] != self._sequences:
            raise self._damaged()
        end = 0
        if self._sequences:
            last = self._read_idx(self._pointers_at - 4, 1, np.int32)
            end = int(self._pointers(self._sequences - 1, self._sequences)[0]) + int(last[0]) * self._width
        if end != self._bin.size:
            raise DataError(
                f"{self._bin.path} has {self._bin.size} bytes, but its index counts {end // self._width} tokens of "
                f"{self._width} bytes: one of the two files is truncated or from another corpus, write them again"
            )

    def _pointers(self, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the first byte of each sequence [first, stop); the one after the last begins at the end of `.bin`."""
        pointers = self._read_idx(self._pointers_at + 8 * first, min(stop, self._sequences) - first, np.int64)
        return pointers if stop <= self._sequences else np.append(pointers, self._bin.size)

    def _read_idx(self, place: int, count: int, kind: type[_Number]) -> NDArray[_Number]:
        numbers = np.empty(count, dtype=kind)
        self._idx.read(place, numbers.data)
        return numbers

    def _damaged(self) -> DataError:
        return DataError(f"{self._idx.path} is damaged (its lengths, pointers and documents disagree): write it again")
