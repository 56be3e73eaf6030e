"""`megalite k8s` as tests type it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from launch.cli.app import app

KINDS = ["trainjob", "jobset", "pytorchjob"]
LAYOUT = ["parallel.tensor_parallel_size=2", "parallel.data_parallel_size=2", "run_dir=runs/My_Run", "data.path=text"]
Run = Callable[..., str]


def command(config: Path) -> Run:
    """The command on two nodes of two GPUs, in this process; what it prints."""

    def run(*more: str, layout: tuple[str, ...] = ("--nodes", "2", "--gpus-per-node", "2")) -> str:
        line = ["k8s", str(config), *LAYOUT, "--image", "registry.io/megalite:1", "--output-claim", "runs", *layout]
        done = CliRunner().invoke(app, [*line, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def from_yaml(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return list(yaml.safe_load_all(text))
