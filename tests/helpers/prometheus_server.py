"""Debian's Prometheus: its linter of metrics and rules, and a server that scrapes the targets of a file.

`why_no_prometheus` is one sentence, or None where it is installed; as a program this installs Debian's package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from launch.runtime.local_ranks import free_port
from tests.helpers.debian import PATH, install_packages, missing_programs

PROGRAMS = ("prometheus", "promtool")
PACKAGES = ("prometheus",)
ANSWERS_S = 60.0
EVERY = "500ms"  # between two scrapes


def why_no_prometheus() -> str | None:
    """Why metrics cannot be tried here; None where they can."""
    if not missing_programs(PROGRAMS):
        return None
    return "NO PROMETHEUS HERE: it is not installed. `make test-packages` as root on Debian installs it"


def promtool(*words: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs promtool, with `text` as its input."""
    return subprocess.run(
        ["promtool", *map(str, words)],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PATH": PATH},
    )


class Server:
    """A Prometheus that runs."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an expression, with `value` (or `values`, for a range) as Prometheus writes them."""
        asked = {"query": expression} | ({"time": str(at)} if at is not None else {})
        with urllib.request.urlopen(f"{self._address}/api/v1/query?{urllib.parse.urlencode(asked)}", timeout=10) as it:
            return list(json.load(it)["data"]["result"])

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def prometheus_server(folder: Path, targets: Path) -> Iterator[Server]:
    """Scrapes what the file of targets names while it is open; keeps its data in `folder`."""
    files = {"files": [str(targets)], "refresh_interval": "1s"}  # the folder need not be there yet
    job = {"job_name": "megalite", "scrape_interval": EVERY, "file_sd_configs": [files]}
    settings, port = folder / "prometheus.yml", free_port()
    settings.write_text(yaml.safe_dump({"scrape_configs": [job | {"scrape_timeout": EVERY}]}))
    log = (folder / "prometheus.log").open("wb")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={settings}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        env=os.environ | {"PATH": PATH},
        stdout=log,
        stderr=log,
    )
    try:
        server, began = Server(port), time.monotonic()
        while not server.is_ready():
            assert process.poll() is None, (folder / "prometheus.log").read_text()[-2000:]
            assert time.monotonic() < began + ANSWERS_S, "Prometheus does not answer"
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()
        log.close()


if __name__ == "__main__":
    if missing_programs(PROGRAMS) and (said := install_packages(PACKAGES)):
        print(f"no Prometheus is installed: {said}: tests that need it are skipped", file=sys.stderr)
