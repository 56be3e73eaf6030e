"""Entry of the `megalite` command, which is `python -m launch` too.

A signal is answered with a sentence before anything else is imported: the imports of the command line take a second.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command line."""
    try:
        waiting = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
        for number in waiting:
            signal.signal(number, _leave)
        from launch.cli.app import main as run

        for number in waiting:
            signal.signal(number, signal.SIG_DFL)
        run()
    except KeyboardInterrupt:
        _leave(signal.SIGINT, None)


def _leave(number: int, frame: FrameType | None) -> None:
    name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    print(f"megalite: warning: {name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
