"""Entry of the `megalite` command, which is `python -m launch` too.

A signal is answered with a sentence before the command line is imported, which takes a second.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from types import FrameType

from launch.runtime.import_path import exclude_current_folder
from launch.runtime.printing import escape_what_cannot_be_written, say


def main() -> None:
    """Runs the command line. `train` keeps its answer to signals until what runs next has one."""
    escape_what_cannot_be_written()
    word = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    is_run = word == "train"
    if (notice := exclude_current_folder()) is not None:
        say(f"megalite: warning: {notice}", file=sys.stderr, flush=True)
    try:
        from megalite.resilience.signals import STOP_SIGNALS

        taken = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
        for number in taken:
            signal.signal(number, partial(_leave, is_run=is_run))
        is_asked_first = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_asked_first:  # raised while pydantic's Rust is imported, a KeyboardInterrupt would be a panic of its own
            signal.signal(signal.SIGINT, _leave)
        from megalite.config.user_folders import ensure_home

        ensure_home()  # before libraries look for it
        from launch.cli.app import COMMANDS, load
        from launch.cli.app import main as run

        if word in COMMANDS:
            load(word)
        if is_asked_first:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not is_run:
            for number in taken:
                signal.signal(number, signal.SIG_DFL)
        run()
    except KeyboardInterrupt:
        _leave(signal.SIGINT, None)
    except ModuleNotFoundError as error:
        package = error.name or ""
        if "." in package or package in sys.modules or not package:  # a part of one, which should be there
            raise
        remedy = "install it, or megalite with all that it needs (pip install -e .)"
        say(f"megalite: error: there is no package {package} in {sys.prefix}: {remedy}", file=sys.stderr, flush=True)
        sys.exit(2)


def _leave(number: int, frame: FrameType | None, *, is_run: bool = False) -> None:
    name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    code = 128 + number
    if is_run:
        from megalite.resilience.signals import START_UP, exit_code_for

        name, code = f"{name} {START_UP}", exit_code_for(number)
    say(f"megalite: warning: {name}", file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
