"""What sinks use reads no settings of the current folder, which may be a model that was downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megalite.monitor.loss_picture import plot_loss

KEY = "0123456789abcdef" * 2 + "01234567"
LOGGED = """
import logging, sys
from pathlib import Path
from megalite.config.sections import WandbConfig
from megalite.monitor.sinks.wandb import WandbSink
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
sink = WandbSink(WandbConfig(enabled=True, mode="online"), Path(sys.argv[1]), {})
print("entity", sink._run.settings.entity)
sink.on_step({"step": 1, "loss": 2.0})
sink.close()
"""


@contextmanager
def server() -> Iterator[tuple[str, list[str | None]]]:
    """A server that knows no key, its URL, and the Authorization of each request that it got."""
    got: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.headers["Authorization"])
            self.send_error(401)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", got
    finally:
        http.shutdown()
        http.server_close()


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_the_key_of_wandb_goes_to_the_users_own_server(name: str, tmp_path: Path) -> None:
    """The server and the entity in the user's own file are taken; of the other file one warning tells."""
    home, here, run_dir = tmp_path / "home", tmp_path / "model", tmp_path / "run"
    run_dir.mkdir()
    with server() as (ours, got), server() as (theirs, stolen):
        for folder, url, entity in ((home / ".config" / "wandb", ours, "us"), (here / name, theirs, "them")):
            folder.mkdir(parents=True)
            (folder / "settings").write_text(f"[default]\nbase_url = {url}\nentity = {entity}\n")
        clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        done = subprocess.run(
            [sys.executable, "-P", "-c", LOGGED, run_dir],
            cwd=here,
            env=clean | {"HOME": str(home), "WANDB_API_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert not stolen and any(header and header.startswith("Basic ") for header in got)
    assert "entity us\n" in done.stdout and "logging offline" in done.stdout
    assert done.stdout.count(f"{here / name / 'settings'} is not read") == 1
    assert len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_a_matplotlibrc_draws_no_picture(tmp_path: Path) -> None:
    """It could have LaTeX run a preamble. matplotlib reads it when it is loaded, so in a process of its own."""
    (tmp_path / "matplotlibrc").write_text(
        "text.usetex: True\ntext.latex.preamble: \\input{/etc/passwd}\nfigure.facecolor: black\n"
    )
    draw = "import sys; from pathlib import Path; from megalite.monitor.loss_picture import plot_loss\n" + (
        "plot_loss([{'step': 1, 'loss': 2.0}, {'step': 2, 'loss': 1.0}], Path(sys.argv[1]), 'a $run$')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", draw, tmp_path / "loss.png"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr
    plot_loss([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], tmp_path / "here.png", "a $run$")
    assert (tmp_path / "loss.png").read_bytes() == (tmp_path / "here.png").read_bytes()
