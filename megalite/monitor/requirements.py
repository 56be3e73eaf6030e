"""Checks that the section `monitor` asks for nothing that is missing, before a rank starts. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

from megalite.config.errors import ConfigError
from megalite.config.sections import MonitorConfig, PrometheusConfig


def check_monitoring(options: MonitorConfig) -> None:
    """Raises ConfigError, one sentence, where a package is missing here."""
    prometheus = options.prometheus
    if prometheus.enabled or prometheus.textfile is not None:
        packages = ["prometheus_client"] + ["pynvml"] * (prometheus.gpus is True)
        _need("monitor.prometheus", packages, "megalite[prometheus]")
    if options.tensorboard:
        _need("monitor.tensorboard", ["tensorboard"], "megalite[tensorboard]")
    if options.wandb.enabled:
        _need("monitor.wandb", ["wandb"], "wandb")
    if options.trackio.enabled:
        _need("monitor.trackio", ["trackio"], "trackio")


def check_textfile(options: PrometheusConfig) -> None:
    """Raises ConfigError, one sentence, where the folder for textfiles cannot be written on this host."""
    folder = options.textfile
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"monitor.prometheus.textfile {folder} is no folder that can be written: make it, or name the folder of "
            "node_exporter's --collector.textfile.directory"
        )


def _need(option: str, packages: Sequence[str], what: str) -> None:
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(
            f"{option} needs {' and '.join(missing)}, which this Python lacks: pip install '{what}', or leave it out"
        )
