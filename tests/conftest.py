"""What many tests need: a small prepared corpus and a config that trains on it in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

settings.register_profile("busy machine", deadline=None)  # an example may wait for a core that ranks have
settings.load_profile("busy machine")

VOCAB_SIZE = 320


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`exhaustive` tests run only when asked for by name."""
    if "exhaustive" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models whose matrices are tiny: a second thread would only spin, on a core that ranks want."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a prepared corpus: some of the Python standard library's own sources."""
    from data_pipeline.prepare import prepare
    from data_pipeline.tokenizer import python_stdlib_sources, train_tokenizer

    folder = tmp_path_factory.mktemp("corpus")
    sources = [path for path in python_stdlib_sources() if path.stat().st_size < 20_000][:40]
    train_tokenizer(sources, folder / "tokenizer", VOCAB_SIZE)
    prepare([str(path) for path in sources], folder / "text", folder / "tokenizer", workers=1)
    return folder / "text"


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """A config, as YAML holds it, of a model that steps in milliseconds."""
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 50,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        },
        "data": {"path": str(corpus), "held_out_fraction": 0.3},
        "precision": {"dtype": "fp32"},
        "training": {"global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 32, "steps": 4},
    }


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """`config` as a YAML file."""
    path.write_text(yaml.safe_dump(config))
    return path
