"""Everything that is printed, with characters that control a terminal shown instead of sent.

Names, keys and messages come from files and hosts of strangers: an escape sequence among them could rename the window,
move the cursor or hide what follows. Such characters are replaced where text is printed, and nowhere before: by `say`
and `print_result`, in log lines (`launch.runtime.logs`), tables and progress bars (`launch.output`).
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from types import TracebackType
from typing import IO

# all of Unicode's Cc but tab and line feed, line separators, what changes the direction of text, and half characters
_CONTROLS = re.compile(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def visible(text: str) -> str:
    r"""Returns `text` with each character that controls a terminal as an escape, such as `\x1b`; keeps line breaks."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def open_closed_streams() -> None:
    """Opens the null device in the place of standard streams that this process was started without (`>&-`).

    The next file that is opened, perhaps a checkpoint, would get the output otherwise.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(descriptor, True)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def escape_what_cannot_be_written() -> None:
    r"""Makes standard output and standard error write `\xf1` for a character that their encoding does not have."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(*values: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None, flush: bool = False) -> None:
    """Prints, as `print` does, without characters that control a terminal."""
    print(visible(sep.join(map(str, values)) + end), end="", file=file, flush=flush)


def print_result(text: str, *, end: str = "\n", flush: bool = False) -> None:
    """Prints text for programs to standard output: exactly, but on a terminal as `say` does."""
    if sys.stdout.isatty():
        text = visible(text)
    print(text, end=end, flush=flush)  # noqa: T201


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a traceback; the text of an unexpected error is a stranger's too. For `sys.excepthook`."""
    say(*traceback.format_exception(kind, error, trace), sep="", end="", file=sys.stderr, flush=True)
