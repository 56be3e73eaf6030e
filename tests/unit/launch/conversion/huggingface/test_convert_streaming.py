"""A conversion needs memory for a part of a tensor, and an interrupted one leaves nothing under the final name."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch.conversion.huggingface.exporting import export_hugging_face
from launch.conversion.huggingface.importing import import_hugging_face
from launch.conversion.huggingface.progress import SAMPLE_S, PeakMemory
from launch.conversion.huggingface.streaming import Stream
from launch.errors import USER_ERRORS
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface import folder as hugging_face
from megalite.checkpoint.huggingface.folder import HuggingFaceFolder
from tests.helpers.audit import verify_digests
from tests.helpers.hub_models import HUB_MODELS, HubModel
from tests.unit.megalite.checkpoint.test_atomic_folder import in_a_child

MODELS = {model.name: model for model in HUB_MODELS}
LLAMA = MODELS["llama"]
MIB = 1 << 20


@pytest.mark.slow
def test_memory_is_for_a_part_of_a_tensor(tmp_path: Path) -> None:
    """Blocks, and 24 MiB on the way to the disk, beside two 50 MiB tensors; transposed (GPT-2's) and fused ones too."""
    wide = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 1}
    models = [
        HubModel("", "llama", {**wide, "vocab_size": 51_200}),
        HubModel("", "gpt2", {**wide, "n_inner": 51_200}),
        HubModel("", "phi3", {**wide, "intermediate_size": 25_600}),
    ]
    for number, model in enumerate(models):
        folder = model.save(tmp_path / f"hf{number}", torch.bfloat16)
        checkpoint, out = tmp_path / f"checkpoint{number}", tmp_path / f"out{number}"
        imported = import_hugging_face(folder, checkpoint, validate=False)
        exported = export_hugging_face(checkpoint, out, validate=False)
        for summary in (imported, exported):
            assert summary.bytes_read + summary.bytes_written > 100 * MIB
            assert summary.peak_memory_bytes is not None and summary.peak_memory_bytes < 64 * MIB
        one, other = (load_file(path / "model.safetensors") for path in (folder, out))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_peak_of_memory_is_what_is_held_at_once() -> None:
    """And what was there before, or is mapped from files, is not counted."""
    size = 32 * MIB
    with mmap.mmap(-1, size) as before:
        before.write(bytes(size))
        # malloc might have as much at hand
        with PeakMemory() as peak, mmap.mmap(-1, size, mmap.MAP_PRIVATE) as held:
            held.write(bytes(MIB) * 32)
            time.sleep(5 * SAMPLE_S)
    assert peak.bytes is not None and 0.9 * size < peak.bytes < 1.5 * size


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi3"])
def test_tensors_in_many_blocks_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Memory for a block is used again for the next one, by the time the last one is on its way."""
    monkeypatch.setattr(hugging_face, "BLOCK_BYTES", 700)
    folder = MODELS[name].save(tmp_path / "hf", torch.bfloat16)
    import_hugging_face(folder, tmp_path / "checkpoint", validate=False)
    export_hugging_face(tmp_path / "checkpoint", tmp_path / "out", validate=False)
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_progress_counts_every_byte_that_is_written(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = LLAMA.save(tmp_path / "hf")
    summary = import_hugging_face(
        folder, tmp_path / "checkpoint", report=lambda what, done, total: seen.append((what, done, total))
    )
    writing = [(done, total) for what, done, total in seen if what.startswith("writing")]
    assert writing[-1] == (summary.bytes_written, summary.bytes_written)
    assert [done for done, _ in writing] == sorted(done for done, _ in writing)
    assert {what for what, *_ in seen} == {f"writing {tmp_path / 'checkpoint'}", "comparing logits with transformers"}
    comparing = [done for what, done, _ in seen if what.startswith("comparing")]
    assert comparing[0] == 0 and comparing == sorted(comparing), "it is said before transformers is loaded"


def test_an_export_notices_a_weight_that_has_changed_on_disk(tmp_path: Path) -> None:
    """Still a finite number, in which transformers and we agree."""
    import_hugging_face(LLAMA.save(tmp_path / "hf"), tmp_path / "checkpoint", validate=False)
    file = next((tmp_path / "checkpoint").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-4] ^= 1  # the lowest bit of the last number
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="has changed since it was written: its digest differs"):
        export_hugging_face(tmp_path / "checkpoint", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]


def _convert(way: str, tmp_path: Path, tell: Any, **options: Any) -> None:
    if way == "import":
        import_hugging_face(tmp_path / "hf", tmp_path / "target", validate=False, report=tell, **options)
    else:
        export_hugging_face(tmp_path / "source", tmp_path / "target", validate=False, report=tell, **options)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    import_hugging_face(LLAMA.save(tmp_path / "hf"), tmp_path / "source", validate=False)
    return tmp_path


def _after(tensors: int, action: Callable[[], object]) -> Callable[[str, int, int], None]:
    """To be told of progress; after so many blocks something happens."""
    told = [0]

    def tell(what: str, done: int, total: int) -> None:
        told[0] += 1
        if told[0] == tensors:
            action()

    return tell


@pytest.mark.parametrize("way", ["import", "export"])
@pytest.mark.parametrize("blocks", [1, 15, 30])
def test_a_killed_conversion_leaves_nothing_under_the_name_and_the_next_one_cleans_up(
    sources: Path, way: str, blocks: int
) -> None:
    def killed() -> None:
        torch.set_num_threads(1)
        _convert(way, sources, _after(blocks, lambda: os.kill(os.getpid(), signal.SIGKILL)))

    assert in_a_child(killed) == -signal.SIGKILL
    assert not (sources / "target").exists() and (sources / ".target.tmp").exists()
    _convert(way, sources, _after(0, lambda: None))
    assert sorted(path.name for path in sources.iterdir()) == ["hf", "source", "target"]
    _readable(way, sources / "target")


def _readable(way: str, folder: Path) -> None:
    if way == "import":
        verify_digests(folder)
    else:
        assert len(HuggingFaceFolder(folder).shapes) == 30


@pytest.mark.parametrize("way", ["import", "export"])
def test_an_interrupted_conversion_leaves_what_was_there(sources: Path, way: str) -> None:
    """Ctrl-C, also over an older folder that was to be replaced."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _convert(way, sources, _after(7, interrupt))
    assert sorted(path.name for path in sources.iterdir()) == ["hf", "source"]
    _convert(way, sources, _after(0, interrupt))
    with pytest.raises(USER_ERRORS, match="not empty"):
        _convert(way, sources, _after(0, interrupt))
    with pytest.raises(KeyboardInterrupt):
        _convert(way, sources, _after(7, interrupt), overwrite=True)
    _readable(way, sources / "target")
    _convert(way, sources, _after(0, interrupt), overwrite=True)
    assert sorted(path.name for path in sources.iterdir()) == ["hf", "source", "target"]


@pytest.mark.parametrize("way", ["import", "export"])
def test_a_write_that_fails_is_one_sentence_and_leaves_nothing(sources: Path, way: str) -> None:
    """The limit of a file's size stands for a full disk: a write fails in the middle of the weights."""

    def limited() -> None:
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(USER_ERRORS, match=r"target: cannot be written: File too large$"):
            _convert(way, sources, _after(0, lambda: None))

    assert in_a_child(limited) == 0
    assert sorted(path.name for path in sources.iterdir()) == ["hf", "source"]


@pytest.mark.parametrize("way", ["import", "export"])
def test_a_disk_that_is_too_small_is_noticed_before_a_byte_is_written(
    sources: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.checkpoint.atomic_folder.room_at", lambda folder: 1000)
    monkeypatch.setattr(Stream, "blocks", None)
    with pytest.raises(USER_ERRORS, match=r"target: takes 0\.\d MB, and 0\.\d MB are free: free some space"):
        _convert(way, sources, _after(0, lambda: None))
    assert sorted(path.name for path in sources.iterdir()) == ["hf", "source"]
