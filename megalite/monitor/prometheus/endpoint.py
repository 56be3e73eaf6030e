"""The port of one host at which Prometheus reads metrics, the file that names all of them, and the textfile."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.checkpoint.durable_files import write_durably
from megalite.config.loading.secrets_in_text import without_secrets
from megalite.config.sections import PrometheusConfig
from megalite.monitor.prometheus.metrics_server import MetricsServer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

PORTS = 10  # that are tried
LAST_WRITE_S = 10.0  # for the end of a run to wait for a file system that hangs
TARGETS = "prometheus_targets.json"
EVERYWHERE = ("0.0.0.0", "::", "[::]")
Render = Callable[[], Iterable["Metric"]]


class Rendering:
    """A collector of prometheus_client that makes its metrics when it is asked for them."""

    def __init__(self, render: Render, nonfatal: Callable[[str], AbstractContextManager[None]]) -> None:
        self._render, self._nonfatal = render, nonfatal

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of this moment; what fails is left out of the scrape."""
        made: list[Metric] = []
        with self._nonfatal("Prometheus"):
            made = list(self._render())
        yield from made


class Endpoint:
    """Serves a registry over HTTP while it is open."""

    def __init__(self, options: PrometheusConfig, registry: CollectorRegistry, tell: Callable[[str], None]) -> None:
        """`tell` takes a sentence where another port is taken. Raises OSError where none can be had."""
        self._options = options
        for port in range(options.port, options.port + PORTS):
            try:
                self._server = MetricsServer(options.host, port, registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if port == options.port + PORTS - 1:
                    raise OSError(
                        f"ports {options.port} to {port} of {socket.gethostname()} are all taken, and nobody can ask "
                        "for metrics there: set monitor.prometheus.port to a free one"
                    ) from None
                continue
            self.port = port
            break
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics server", daemon=True)
        self._thread.start()
        if self.port != options.port:
            tell(f"port {options.port} is taken on {socket.gethostname()}: its metrics are on {self.port}")

    @property
    def target(self) -> str:
        """Address and port for Prometheus: that of the option, or this host's name if it means all addresses."""
        host = socket.gethostname() if self._options.host in EVERYWHERE else self._options.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def write_targets(run_dir: Path, targets: Sequence[str]) -> None:
    """Writes what file_sd of Prometheus reads: all hosts' targets, with the run as their label. Raises OSError."""
    entry = {"targets": sorted({*targets}), "labels": {"run": label_of(run_dir)}}
    write_durably(run_dir / TARGETS, (json.dumps([entry], indent=2) + "\n").encode())


def label_of(run_dir: Path) -> str:
    """Returns the label `run`: the folder as the config names it, without what seems to be a secret."""
    return str(without_secrets(str(run_dir)))


class TextfileWriter:
    """Writes metrics for node_exporter's textfile collector whenever it is asked, in a thread of its own."""

    def __init__(
        self, folder: Path, run_dir: Path, render: Render, nonfatal: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        from prometheus_client import CollectorRegistry

        self.path = folder / f"megalite_{re.sub(r'[^A-Za-z0-9_-]+', '_', label_of(run_dir)).strip('_')}.prom"
        self._nonfatal, self._registry = nonfatal, CollectorRegistry()
        self._registry.register(Rendering(render, nonfatal))
        self._is_due, self._is_over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="textfile", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Asks for a new file; returns at once."""
        self._is_due.set()

    def close(self, *, remove: bool) -> None:
        """Writes what was asked for last; or removes the file, so that nobody takes an ended run for a silent one."""
        self._is_over = True
        self._is_due.set()
        self._thread.join(LAST_WRITE_S)
        if remove:
            self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            self._is_due.wait()
            self._is_due.clear()
            is_over = self._is_over  # before the last write, which nobody may ask for in vain
            with self._nonfatal("the textfile for node_exporter"):
                self._write()

    def _write(self) -> None:
        from prometheus_client import generate_latest

        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")  # node_exporter reads only *.prom
        try:
            temporary.write_bytes(generate_latest(self._registry))
            temporary.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
