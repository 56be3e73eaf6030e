"""A run's folder takes one run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.trainer.run_folder import lock_run_folder
from megalite.config import Config


def test_a_lock_that_is_let_go_is_waited_for_by_those_who_may(tiny: dict[str, Any]) -> None:
    """A file server keeps the lock of a host that has died for a while."""
    config = Config.model_validate(tiny)
    held = lock_run_folder(config)
    with pytest.raises(LaunchError, match="another run is using run_dir"):
        lock_run_folder(config)
    with pytest.raises(LaunchError, match="another run is using run_dir"):
        lock_run_folder(config, patience_s=0.6)
    threading.Timer(0.6, held.close).start()
    lock_run_folder(config, patience_s=20).close()
