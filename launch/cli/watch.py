"""The command `megalite watch`; launch/inspection/watching implements it.

Exit codes: 0, also after Ctrl-C, which is how to end it; 2 user error. No torch.
"""

from __future__ import annotations

import getpass
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.errors import LaunchError
from launch.runtime.logs import get_logger
from launch.runtime.printing import say

log = get_logger(__name__)
LOOPBACK, EVERYWHERE = "127.0.0.1", ("0.0.0.0", "::")


def watch(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN_DIR")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another one than of this machine alone is seen by others.")
    ] = LOOPBACK,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show the run on this terminal; serve no page.")] = False,
) -> None:
    """Show a run while it trains: the page of `megalite report`, which grows, or with --terminal lines on the terminal.

    Reads the run's folder alone, from any host that shares it, and changes nothing. The page is served to who has the
    printed address, whose token is a new one at each start. Ctrl-C ends the command, not the run; --terminal ends with
    the run as well.

    Example: `megalite watch runs/quickstart`
    """
    from launch.inspection.run_files import check_is_run

    check_is_run(run_dir)
    try:
        if terminal:
            _show_on_terminal(run_dir)
        else:
            _serve(run_dir, host, port)
    except KeyboardInterrupt:
        return


def _show_on_terminal(run_dir: Path) -> None:
    from launch.inspection.watching.terminal import follow, plain_line, screen
    from launch.output import changing_lines, console

    try:
        if sys.stdout.isatty():
            with changing_lines() as show:
                for status, history in follow(run_dir):
                    show(screen(status, history, console().width))
            return
        last = None
        for status, history in follow(run_dir):
            if (status.step, status.state) != last:
                last = (status.step, status.state)
                say(plain_line(status, history), flush=True)
    except FileNotFoundError as error:
        raise LaunchError(f"{run_dir} cannot be watched any more: {error.strerror}") from None


def _serve(run_dir: Path, host: str, port: int) -> None:
    from launch.inspection.watching.live_page import LivePage
    from launch.inspection.watching.server import RunServer
    from megalite.monitor.bounded_server import is_loopback

    page = LivePage(run_dir)
    try:
        server = RunServer(host, port, page.routes)
    except (OSError, UnicodeError) as error:
        told = getattr(error, "strerror", None) or error
        sentence = f"nothing can listen on {host}, port {port}: {told}; choose another --port or --host"
        raise LaunchError(sentence) from None
    with server:
        name = socket.gethostname() if host in EVERYWHERE else host
        port, shown = server.server_port, f"[{name}]" if ":" in name else name
        is_local = is_loopback(host)
        if not is_local:
            log.warning(
                f"{host} can be reached from other machines: who gets the address below, which travels unencrypted, "
                f"sees this run; with the default --host {LOOPBACK} only this machine does"
            )
        say(f"http://{shown}:{port}/?token={server.token}")
        if is_local:
            ssh = f"ssh -N -L {port}:{shown}:{port} {getpass.getuser()}@{socket.gethostname()}"
            say(f"from your own machine: {ssh}, then the address above")
        say("Ctrl-C ends the page, not the run", flush=True)
        server.serve_forever(poll_interval=0.2)
