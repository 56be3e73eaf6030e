"""A minimal config file that every config test starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

MINIMAL = """\
run_dir: runs/tiny
model:
  vocab_size: 1000
  hidden_size: 64
  intermediate_size: 172
  num_hidden_layers: 5
  num_attention_heads: 4
data:
  path: shards/stdlib
training:
  global_batch_size: 8
  micro_batch_size: 2
  sequence_length: 32
  steps: 10
"""


@pytest.fixture(scope="session")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with only the required options."""
    path = tmp_path_factory.mktemp("config") / "minimal.yaml"
    path.write_text(MINIMAL)
    return path
