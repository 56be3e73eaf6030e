"""Megatron-LM's and GPT-NeoX's own readers and writers of `.bin` and `.idx`, fetched as they are published.

`test_indexed.py` holds our files against the layout field by field; here the programs that others run decide. Their
files are the versions whose digests stand below, and nothing else of them is imported.
"""

import hashlib
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter, token_dtype

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

MEGATRON_CORE = "0.16.1"
FILES_OF_MEGATRON_CORE = {
    "msc_utils": "334cbec0195857ea9b846a699dee908622dbe3b5c10fec21a797a56cf02752c8",
    "datasets/object_storage_utils": "d0cfea24d600298b113c468c8027b0ecb17dc8b4d69fcbe5c55444b01728b655",
    "datasets/indexed_dataset": "86650eec71319b99e63fde40c95d38176b89cbbe7ede9581aa7c67f1334eab72",
}
GPT_NEOX = (
    "https://raw.githubusercontent.com/EleutherAI/gpt-neox/ea7aefd8f8e183256992d9fede4d7c71a46d67a5/megatron/data/"
    "indexed_dataset.py"
)
GPT_NEOX_SHA256 = "396f4ca2ce7ec064cbd46581d2aa5edbf6e64da38a39b559da0947cdf739aba9"


def loaded(name: str, content: bytes, sha256: str, folder: Path) -> ModuleType:
    """Imports a file under the name by which others import it."""
    assert hashlib.sha256(content).hexdigest() == sha256, f"{name} is another file than was read here"
    path = folder / f"{name}.py"
    path.write_bytes(content)
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def package(name: str, **members: Any) -> None:
    """Puts an empty package in place of a real one, which would import a training stack."""
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(members, __path__=[])


def fetched_megatron_core(folder: Path) -> ModuleType:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    done = subprocess.run([*command, f"megatron-core=={MEGATRON_CORE}"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"megatron-core cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    for name in ("megatron", "megatron.core", "megatron.core.datasets"):
        package(name)
    package("megatron.core.utils", log_single_rank=lambda *_, **__: None)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name, sha256 in FILES_OF_MEGATRON_CORE.items():
            content = wheel.read(f"megatron/core/{name}.py")
            module = loaded(f"megatron.core.{name.replace('/', '.')}", content, sha256, folder)
    return module


def fetched_gpt_neox(folder: Path) -> ModuleType:
    try:
        with urllib.request.urlopen(GPT_NEOX, timeout=30) as answer:
            content = answer.read()
    except OSError as error:
        pytest.skip(f"GPT-NeoX's reader cannot be fetched: {error}")
    package("megatron", print_rank_0=lambda *_: None)
    package("megatron.data")
    return loaded("megatron.data.indexed_dataset", content, GPT_NEOX_SHA256, folder)


@pytest.fixture(scope="module", params=["megatron-core", "gpt-neox"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The module `indexed_dataset` of another project."""
    fetched = fetched_megatron_core if request.param == "megatron-core" else fetched_gpt_neox
    others = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    yield fetched(tmp_path_factory.mktemp("peer"))
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules.update(others)


def write_theirs(peer: ModuleType, prefix: Path, documents: Sequence[Sequence[NDArray[Any]]], dtype: Any) -> None:
    """Writes documents, each of one or more sequences, with the peer's builder."""
    if hasattr(peer, "IndexedDatasetBuilder") and hasattr(peer, "_IndexWriter"):
        builder = peer.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
        for sequences in documents:
            tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
            builder.add_document(tokens, [len(sequence) for sequence in sequences])
    else:
        builder = peer.MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
        for sequences in documents:
            for sequence in sequences:
                builder.add_item(sequence)
            builder.end_document()
    builder.finalize(f"{prefix}.idx")


def read_by_them(peer: ModuleType, prefix: Path) -> list[NDArray[Any]]:
    if hasattr(peer, "MMapIndexedDataset"):
        tokens = peer.MMapIndexedDataset(str(prefix), skip_warmup=True)
    else:
        tokens = peer.IndexedDataset(str(prefix))
    return [np.array(tokens[number]) for number in range(len(tokens))]  # a view would outlive their map of the file


LENGTHS: dict[str, list[int]] = {
    "usual": np.random.default_rng(1).integers(1, 300, size=200).tolist(),
    "empty documents": [0, 3, 0, 0, 7, 0],
    "one document": [5],
    "a long document": [1, 3_000_000, 2],
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("vocab_size", [300, 65_499, 65_500, 65_535, 65_536, 65_537, 128_256])
def test_files_are_equal_and_read_both_ways(peer: ModuleType, vocab_size: int, lengths: str, tmp_path: Path) -> None:
    """An id near the border of a type, an empty document and pointers beyond 2^22 are where layouts part."""
    dtype = token_dtype(vocab_size)
    rule = peer.DType.optimal_dtype if hasattr(peer, "DType") else getattr(peer, "__best_fitting_dtype")
    assert np.dtype(rule(vocab_size)) == dtype
    draw = np.random.default_rng(2)
    documents = [draw.integers(0, vocab_size, size=length).astype(dtype) for length in LENGTHS[lengths]]
    for document in documents:
        document[:1] = vocab_size - 1
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for document in documents:
            writer.append(document, np.array([len(document)]))
    write_theirs(peer, tmp_path / "theirs", [[document] for document in documents], dtype)
    for ending in (".bin", ".idx"):
        ours, theirs = ((tmp_path / f"{name}{ending}").read_bytes() for name in ("ours", "theirs"))
        assert ours == theirs, ending
    tokens = IndexedTokens(tmp_path / "theirs")
    for number, found in enumerate(read_by_them(peer, tmp_path / "ours")):
        np.testing.assert_array_equal(found, documents[number])
        np.testing.assert_array_equal(tokens.document(number), documents[number])
    assert len(tokens) == len(documents) == number + 1


def test_documents_of_several_sequences_are_joined(peer: ModuleType, tmp_path: Path) -> None:
    documents = [[4, 6], [7], [1, 0, 8]]
    counts = [[np.arange(length, dtype=np.uint16) for length in lengths] for lengths in documents]
    write_theirs(peer, tmp_path / "theirs", counts, np.dtype(np.uint16))
    tokens = IndexedTokens(tmp_path / "theirs")
    assert [tokens.document(number).tolist() for number in range(len(tokens))] == [
        np.concatenate(sequences).tolist() for sequences in counts
    ]
