"""Files that are written in pieces, past the page cache or not, are what safetensors reads."""

from __future__ import annotations

import errno
import hashlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.checkpoint.huggingface import safetensors_writer as safetensors_file
from megalite.checkpoint.huggingface.safetensors_writer import ALIGNMENT, Entry, write_safetensors

PIECE = 2 * ALIGNMENT


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", PIECE)


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    entries = [Entry(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
    written = write_safetensors(path, entries, lambda entry: tensors[entry.key].split(7))
    assert written.size == path.stat().st_size
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("last_bytes", range(0, 2 * ALIGNMENT + 1, ALIGNMENT // 2))
def test_every_byte_is_written_and_hashed_wherever_the_last_piece_ends(tmp_path: Path, last_bytes: int) -> None:
    """A piece used again before it is on disk, or padding left behind a file's end, would show here."""
    torch.manual_seed(last_bytes)
    tensors = {
        "matrix": torch.randn(100, 333),
        "strided": torch.randn(50, 40).t(),
        "bf16": torch.randn(17).bfloat16(),
        "none": torch.empty(0, 3),
        "last": torch.randn(PIECE + last_bytes // 4),
    }
    write(tmp_path / "file", tensors)
    read = load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensors[key]) for key in tensors)


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """Not a multiple of any disk's block."""
    limit, before = 3 * PIECE + 13, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_pieces")
def test_a_write_that_cannot_be_aligned_goes_through_the_page_cache(tmp_path: Path, file_size_limit: int) -> None:
    """The kernel cuts the write at the limit and then refuses it as unaligned: the user is told the true reason."""
    with pytest.raises(OSError) as caught:
        write(tmp_path / "file", {"weight": torch.zeros(PIECE)})
    assert caught.value.errno == errno.EFBIG
    assert (tmp_path / "file").stat().st_size == file_size_limit
