"""Hugging Face folders: read exactly, refused in one sentence, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface import folder as hugging_face
from megalite.checkpoint.huggingface.folder import WEIGHTS, HuggingFaceFolder, row_blocks, write_weights
from megalite.checkpoint.huggingface.safetensors_writer import Entry
from tests.helpers.hub_models import HUB_MODELS

MODELS = {model.name: model for model in HUB_MODELS}
LLAMA, TIED = MODELS["llama"], MODELS["llama-tied"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return dict(LLAMA.build().state_dict())


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_every_slice_of_every_tensor_is_read(tmp_path: Path, weights: dict[str, torch.Tensor], shard_size: str) -> None:
    folder = HuggingFaceFolder(LLAMA.save(tmp_path / "hf", max_shard_size=shard_size))
    folder.check_tensors(_shapes(weights), copies={}, ignored=lambda name: False)
    assert (len(list(folder.folder.glob("*.safetensors"))) > 3) == (shard_size == "40KB")
    for name, tensor in weights.items():
        part = tuple(slice(n // 3, n) for n in tensor.shape)
        assert torch.equal(folder.read(name), tensor)
        assert torch.equal(folder.read(name, part), tensor[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [2 * 10**9, 30_000])
def test_what_is_written_is_what_transformers_reads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Our own streaming writer, in many row blocks, against the reader that everyone uses."""
    monkeypatch.setattr(hugging_face, "BLOCK_BYTES", 1000)
    entries = [Entry(name, shape, dtype) for name, shape in _shapes(weights).items()]

    def blocks(entry: Entry) -> Iterator[torch.Tensor]:
        return (weights[entry.key][rows].to(dtype) for rows in row_blocks(entry.shape, 4))

    size = write_weights(tmp_path, entries, blocks, shard_bytes)
    assert size == sum(tensor.numel() * dtype.itemsize for tensor in weights.values())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 or all(path.stat().st_size < 2 * shard_bytes for path in files)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes < 10**6)
    stored = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], tensor.to(dtype)) for name, tensor in weights.items())
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    LLAMA.config().save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in weights.items())


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def _swap_two_files(folder: Path) -> None:
    def swap(places: dict[str, str]) -> None:
        first, second = sorted(set(places.values()))[:2]
        exchanged = {first: second, second: first}
        places.update({name: exchanged.get(file, file) for name, file in places.items()})

    _edit_index(folder, swap)


SINGLE: list[tuple[str, Callable[[Path], object], str]] = [
    ("tensor missing", lambda f: _rewrite(f, lambda t: t.pop("model.norm.weight")), "no tensor model.norm.weight"),
    ("tensor unknown", lambda f: _rewrite(f, lambda t: t.update(extra=torch.ones(2))), "has tensor extra"),
    (
        "wrong shape",
        lambda f: _rewrite(f, lambda t: t.update({HEAD: torch.ones(130, 48)})),
        r"\[130, 48\].*\[131, 48\]",
    ),
    ("quantised", lambda f: _rewrite(f, lambda t: t.update({HEAD: t[HEAD].to(torch.int8)})), "stored as I8"),
    ("cut short", lambda f: _cut_short(f / "model.safetensors"), "cut short"),
    ("empty file", lambda f: (f / "model.safetensors").write_bytes(b""), "not readable as safetensors"),
    ("no pickle in a .bin", lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "not a pickle of weights"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "no weights"),
    ("a folder of its name", lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).mkdir()), "no weights"),
    ("no config", lambda f: (f / "config.json").unlink(), "no config.json"),
    ("config no JSON", lambda f: (f / "config.json").write_text("{"), "not readable as JSON"),
    ("config no object", lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    ("no folder", lambda f: f.rename(f.with_name("elsewhere")), "no such folder"),
]
FIRST = "model-00001-of-"
SHARDED: list[tuple[str, Callable[[Path], object], str]] = [
    ("shard missing", lambda f: next(f.glob(f"{FIRST}*")).unlink(), f"{FIRST}.* is missing"),
    ("shard cut short", lambda f: _cut_short(next(f.glob(f"{FIRST}*"))), "cut short"),
    ("path to itself", lambda f: _edit_index(f, lambda m: m.update({HEAD: "."})), "outside the folder"),
    ("empty path", lambda f: _edit_index(f, lambda m: m.update({HEAD: ""})), "missing"),
    ("path with a newline", lambda f: _edit_index(f, lambda m: m.update({HEAD: "a\nb/\nc"})), "outside the folder"),
    ("escaping path", lambda f: _edit_index(f, lambda m: m.update({HEAD: "../x.safetensors"})), "outside the folder"),
    ("absolute path", lambda f: _edit_index(f, lambda m: m.update({HEAD: "/etc/passwd"})), "outside the folder"),
    ("number as path", lambda f: _edit_index(f, lambda m: m.update({HEAD: 3})), "outside the folder"),  # type: ignore[dict-item]
    ("index lists too much", lambda f: _edit_index(f, lambda m: m.update(ghost=m[HEAD])), "holds no ghost"),
    ("index swaps two files", _swap_two_files, "which the index places elsewhere|holds no"),
    ("index is a list", lambda f: (f / "model.safetensors.index.json").write_text("[1]"), "not a JSON object"),
    (
        "index lists too little",
        lambda f: _edit_index(f, lambda m: m.pop("model.norm.weight")),
        "the index places elsewhere",
    ),
    ("index without map", lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
]


@pytest.mark.parametrize(
    ("max_shard_size", "spoil", "says"),
    [("1GB", *case[1:]) for case in SINGLE] + [("40KB", *case[1:]) for case in SHARDED],
    ids=[case[0] for case in SINGLE + SHARDED],
)
def test_a_bad_folder_is_refused_in_one_sentence(
    tmp_path: Path, weights: dict[str, torch.Tensor], max_shard_size: str, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(LLAMA.save(tmp_path / "hf", max_shard_size=max_shard_size))
    with pytest.raises(CheckpointError, match=says) as caught:
        HuggingFaceFolder(tmp_path / "hf").check_tensors(_shapes(weights), copies={}, ignored=lambda name: False)
    assert "\n" not in str(caught.value)


def test_a_tied_head_may_be_absent_or_equal_but_not_different(tmp_path: Path) -> None:
    folder = TIED.save(tmp_path / "hf")
    wanted = {name: shape for name, shape in HuggingFaceFolder(folder).shapes.items() if name != HEAD}
    for head in (None, "equal", "different"):
        if head:
            _rewrite(folder, lambda t: t.update({HEAD: t[EMBEDDING] + (0 if head == "equal" else 1e-6)}))  # noqa: B023
        read = HuggingFaceFolder(folder)
        if head == "different":
            with pytest.raises(CheckpointError, match="tie_word_embeddings"):
                read.check_tensors(wanted, {HEAD: EMBEDDING}, lambda name: False)
        else:
            read.check_tensors(wanted, {HEAD: EMBEDDING}, lambda name: False)


def test_an_ignored_tensor_is_not_an_error(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Old Llama checkpoints hold `rotary_emb.inv_freq`."""
    folder = LLAMA.save(tmp_path / "hf")
    _rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    HuggingFaceFolder(folder).check_tensors(_shapes(weights), {}, ignored=lambda name: name.endswith("inv_freq"))


def test_a_base_models_folder_lacks_the_prefix(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Saved from LlamaModel instead of LlamaForCausalLM; names that have the prefix are never taken for others."""
    folder = TIED.save(tmp_path / "hf")
    wanted = {name: shape for name, shape in _shapes(weights).items() if name != HEAD}
    whole = HuggingFaceFolder(folder)
    whole.add_prefix("model.", wanted)
    whole.check_tensors(wanted, {}, lambda name: False)
    original = {name: whole.read(name).clone() for name in wanted}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    _rewrite(folder, rename)
    base = HuggingFaceFolder(folder)
    with pytest.raises(CheckpointError, match=r"has no tensor model\."):
        base.check_tensors(wanted, {}, lambda name: False)
    base.add_prefix("model.", wanted)
    base.check_tensors(wanted, {}, lambda name: False)
    assert all(torch.equal(base.read(name), original[name]) for name in wanted)
