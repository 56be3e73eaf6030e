"""Small real things to test with: a tokenizer of a few standard library files, a corpus writer, an S3 server."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.sources.python_stdlib import python_stdlib_sources
from data_pipeline.storage.indexed_writer import IndexedWriter
from data_pipeline.tokenizers.training import train_tokenizer
from tests.helpers.s3_fixtures import place, s3, s3_port

__all__ = ["place", "s3", "s3_port"]

Documents = Sequence[Sequence[int]]


@pytest.fixture(scope="session")
def stdlib_files() -> list[Path]:
    return python_stdlib_sources()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, stdlib_files: list[Path]) -> Path:
    texts = [path.read_text(encoding="utf-8") for path in stdlib_files[:12]]
    return train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer"), 600)


@pytest.fixture
def write_corpus(tmp_path: Path) -> Callable[..., Path]:
    def write(documents: Documents, name: str = "corpus", dtype: type[np.integer] = np.uint16) -> Path:
        with IndexedWriter(tmp_path / name, dtype) as writer:
            for document in documents:
                writer.append(np.array(document, dtype=dtype), np.array([len(document)]))
        return tmp_path / name

    return write
