"""Rules of compressed messages."""

from __future__ import annotations

import pytest

from megalite.config import ConfigError, resolve_layout
from tests.helpers.odd_sizes import config_of


def test_a_density_that_nothing_reads_is_told() -> None:
    with pytest.raises(ConfigError, match="has no effect with compression"):
        resolve_layout(config_of(compression={"gradients": "int8", "density": 0.1}), 1, "cpu")
    resolve_layout(config_of(compression={"gradients": "top_k", "density": 0.1}), 1, "cpu")
