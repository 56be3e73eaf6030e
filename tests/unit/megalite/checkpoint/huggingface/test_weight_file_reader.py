"""Files of weights: any slice of a safetensors file or of an old pickle, and no code out of a pickle."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.folder import HuggingFaceFolder
from megalite.checkpoint.huggingface.weight_file_reader import PickleFile, SafetensorsFile
from tests.helpers.hub_models import HUB_MODELS

LLAMA = HUB_MODELS[0]


class Malicious:
    """Unpickled by an ordinary unpickler it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def as_pickles(folder: Path, shards: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """Turns a folder's safetensors into pytorch_model.bin, or several with an index; returns its tensors."""
    tensors = dict(LLAMA.build().state_dict())
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    places = {name: f"pytorch_model-{i % shards + 1:05d}-of-{shards:05d}.bin" for i, name in enumerate(names)}
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return tensors
    for file in set(places.values()):
        torch.save({name: tensors[name] for name in names if places[name] == file}, folder / file, **options)
    index = {"metadata": {}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_every_slice_of_a_pickled_model_is_read_with_a_word_about_it(tmp_path: Path, is_zip: bool, shards: int) -> None:
    tensors = as_pickles(LLAMA.save(tmp_path / "hf"), shards, _use_new_zipfile_serialization=is_zip)
    folder = HuggingFaceFolder(tmp_path / "hf")
    folder.check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, {}, lambda name: False)
    for name, tensor in tensors.items():
        part = tuple(slice(n // 3, n) for n in tensor.shape)
        assert torch.equal(folder.read(name), tensor) and torch.equal(folder.read(name, part), tensor[part])
    (notice,) = folder.notices
    assert "without running any code" in notice and ("read whole into memory" in notice) == (not is_zip)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, is_zip: bool) -> None:
    folder = LLAMA.save(tmp_path / "hf")
    tensors = as_pickles(folder)
    path, proof = folder / "pytorch_model.bin", tmp_path / "executed"
    torch.save({**tensors, "evil": Malicious(proof)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"asks for posix\.system, which is no weight: none of its") as caught:
        HuggingFaceFolder(folder)
    assert "\n" not in str(caught.value) and not proof.exists()
    torch.load(path, weights_only=False)  # noqa: TID251 - it was malicious indeed
    assert proof.exists()


def save_compressed(path: Path) -> None:
    torch.save({"a": torch.ones(99)}, path)
    parts = zipfile.ZipFile(path)
    whole = {name: parts.read(name) for name in parts.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in whole.items():
            file.writestr(name, data)


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("bare pickle", lambda p: p.write_bytes(pickle.dumps({"a": 1})), "not a pickle of weights alone"),
    ("text", lambda p: p.write_bytes(b"hello" * 9), "not readable as weights|not a pickle"),
    ("empty", lambda p: p.write_bytes(b""), "not readable as weights"),
    ("a module", lambda p: torch.save(torch.nn.Linear(2, 2), p), "no weight|not a pickle of weights"),
    ("a tensor", lambda p: torch.save(torch.ones(2), p), "else than named tensors"),
    ("nested", lambda p: torch.save({"state_dict": {"a": torch.ones(2)}}, p), "else than named tensors"),
    ("no numbers in it", lambda p: torch.save({"a": torch.ones(2, device="meta")}, p), "else than named tensors"),
    ("compressed", save_compressed, "its parts are compressed, as torch never writes them"),
    ("cut short", lambda p: (torch.save({"a": torch.ones(99)}, p), p.write_bytes(p.read_bytes()[:-200])), "cut short"),
]


@pytest.mark.parametrize(("spoil", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_pickle_is_refused_in_one_sentence(tmp_path: Path, spoil: Callable[[Path], object], says: str) -> None:
    spoil(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=says) as caught:
        PickleFile(tmp_path / "pytorch_model.bin")
    assert "\n" not in str(caught.value)


def test_what_follows_is_asked_of_the_disk_ahead_and_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are read in order; columns and single rows ask for nothing more than there is."""
    from safetensors.torch import save_file

    from megalite.checkpoint.huggingface import weight_file_reader

    monkeypatch.setattr(weight_file_reader, "AHEAD_BYTES", 4096)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: asked.append((offset, size)))
    numbers = torch.randn(100, 256)
    save_file({"a": numbers}, tmp_path / "f.safetensors")
    file = SafetensorsFile(tmp_path / "f.safetensors")
    for first in range(0, 100, 2):
        assert torch.equal(file.read("a", (slice(first, first + 2), slice(0, 256))), numbers[first : first + 2])
    assert all(one[0] + one[1] == two[0] for one, two in itertools.pairwise(asked))
    assert asked[0][0] + sum(size for _, size in asked) >= (tmp_path / "f.safetensors").stat().st_size
    count = len(asked)
    assert torch.equal(file.read("a", (slice(0, 100), slice(3, 5))), numbers[:, 3:5]) and len(asked) == count
