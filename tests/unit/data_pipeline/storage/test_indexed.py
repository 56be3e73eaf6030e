"""Megatron's byte layout, and every way in which a pair of files can be broken."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter, token_dtype

DOCUMENTS = [[5, 6, 7], [], [65535], [1, 2]]


def megatron_idx(code: int, lengths: list[int], pointers: list[int], document_indices: list[int]) -> bytes:
    """The index as megatron/core/datasets/indexed_dataset.py writes it, built field by field."""
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(document_indices))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(document_indices)}q", *document_indices)
    )


def test_written_bytes_are_megatrons(write_corpus: Callable[..., Path]) -> None:
    prefix = write_corpus(DOCUMENTS)
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 65535, 1, 2)
    expected = megatron_idx(8, [3, 0, 1, 2], [0, 6, 6, 8], [0, 1, 2, 3, 4])
    assert Path(f"{prefix}.idx").read_bytes() == expected


def test_int32_ids_are_written_with_code_4(write_corpus: Callable[..., Path]) -> None:
    prefix = write_corpus([[70000, 1], [2]], dtype=np.int32)
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<3i", 70000, 1, 2)
    assert Path(f"{prefix}.idx").read_bytes() == megatron_idx(4, [2, 1], [0, 8], [0, 1, 2])


def test_megatrons_bytes_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.bin").write_bytes(struct.pack("<5i", 9, 8, 7, 6, 100000))
    (tmp_path / "c.idx").write_bytes(megatron_idx(4, [2, 3], [0, 8], [0, 1, 2]))
    tokens = IndexedTokens(tmp_path / "c")
    assert (len(tokens), tokens.token_count, tokens.dtype) == (2, 5, np.dtype(np.int32))
    assert tokens.document(1).tolist() == [7, 6, 100000]


def test_several_sequences_of_a_document_are_joined(tmp_path: Path) -> None:
    (tmp_path / "c.bin").write_bytes(struct.pack("<5H", 1, 2, 3, 4, 5))
    (tmp_path / "c.idx").write_bytes(megatron_idx(8, [2, 1, 2], [0, 4, 6], [0, 2, 2, 3, 3]))
    tokens = IndexedTokens(tmp_path / "c")
    assert [tokens.document(i).tolist() for i in range(len(tokens))] == [[1, 2, 3], [], [4, 5], []]


def test_documents_may_be_written_in_pieces(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.append(np.array([1, 2]), np.array([], dtype=np.int64))
        writer.append(np.array([3, 4, 5]), np.array([1, 2]))
        writer.append(np.array([6]), np.array([1]))
    tokens = IndexedTokens(tmp_path / "c")
    assert [tokens.document(i).tolist() for i in range(len(tokens))] == [[1, 2, 3], [4], [5, 6]]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.append(np.array([1]), np.array([1]))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_dtype_follows_megatrons_rule() -> None:
    assert [token_dtype(size) for size in (300, 65499, 65500, 200000)] == [
        np.uint16, np.uint16, np.int32, np.int32,
    ]  # fmt: skip


def test_an_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token id 70000 does not fit the uint16"):
        IndexedWriter(tmp_path / "c", np.uint16).append(np.array([1, 70000]), np.array([2]))


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


BROKEN: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "cut .bin": (".bin", lambda content: content[:-2], r"\.bin has 10 bytes, but its index counts 6 tokens"),
    "longer .bin": (".bin", lambda content: content + b"xx", r"\.bin has 14 bytes"),
    "wrong magic": (".idx", lambda content: b"X" + content[1:], "not a Megatron index"),
    "cut header": (".idx", lambda content: content[:20], "cut off inside its header"),
    "empty .idx": (".idx", lambda content: b"", r"cut off inside its header \(0 of 34 bytes\)"),
    "cut index": (".idx", lambda content: content[:-1], "it is truncated or damaged"),
    "wrong version": (".idx", lambda content: content[:9] + b"\x07" + content[10:], "index version 7"),
    "float dtype": (".idx", lambda content: content[:17] + b"\x06" + content[18:], "float64"),
    "unknown dtype": (".idx", lambda content: content[:17] + b"\x63" + content[18:], "dtype code 99"),
    "negative length": (
        ".idx",
        lambda content: content[:34] + struct.pack("<4i", 4, -1, 1, 2) + content[50:],
        "lengths, pointers and documents disagree",
    ),
    "documents that skip": (".idx", lambda content: content[:-8] + struct.pack("<q", 3), "disagree"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_one_sentence(case: str, write_corpus: Callable[..., Path]) -> None:
    prefix = write_corpus(DOCUMENTS)
    ending, change, sentence = BROKEN[case]
    rewrite(Path(f"{prefix}{ending}"), change)
    with pytest.raises(DataError, match=sentence) as caught:
        IndexedTokens(prefix).check()
    assert "\n" not in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 97), change=st.binary(min_size=1, max_size=12), cut=st.booleans(), trusted=st.booleans())
def test_any_index_is_read_or_one_sentence(
    place: int, change: bytes, cut: bool, trusted: bool, write_corpus: Callable[..., Path]
) -> None:
    """Whatever an index says, no token outside the file is read, and nothing is allocated for what it only claims."""
    prefix = write_corpus(DOCUMENTS)
    rewrite(
        Path(f"{prefix}.idx"),
        lambda content: content[:place] + change + (b"" if cut else content[place + len(change) :]),
    )
    try:
        tokens = IndexedTokens(prefix)
        (tokens.trust if trusted else tokens.check)()
        found = sum(len(tokens.document(i)) for i in range(len(tokens)))
    except DataError as error:
        assert str(prefix) in str(error) and "\n" not in str(error)
    else:
        assert found <= 12


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_file_is_named(ending: str, write_corpus: Callable[..., Path]) -> None:
    prefix = write_corpus(DOCUMENTS)
    Path(f"{prefix}{ending}").unlink()
    with pytest.raises(DataError, match=rf"corpus\{ending} does not exist"):
        IndexedTokens(prefix)
