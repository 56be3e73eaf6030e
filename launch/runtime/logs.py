"""Logging of commands and ranks: one sentence per line, with time and rank if several processes share a console.

A command writes `megalite: sentence`, a rank `[12:34:56 rank 3] megalite: sentence`. Warnings and errors go to stderr
and name their level; everything else goes to stdout. `megalite --quiet` and `--verbose` set the level, which child
processes and ranks on other hosts inherit through the environment.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from launch.runtime.printing import escape_what_cannot_be_written, say

LEVEL = "MEGALITE_LOG_LEVEL"
PACKAGES = ("launch", "megalite", "models", "data_pipeline")
NOISY = ("torchao", "torch.utils._pytree", "torch.distributed.elastic.multiprocessing.redirects")
"""Libraries that warn users of what only their makers can change: binaries of other Pythons beside those that are
loaded, a deprecated call of torchao's, redirects that a system lacks. transformers imports torchao wherever it is."""


class _ConsoleHandler(logging.Handler):
    """Writes to the current `sys.stdout` and `sys.stderr`, as `print` does."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        start = "" if self._rank is None else f"[{at} rank {self._rank}] "
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        say(f"{start}megalite: {level}{record.getMessage()}", file=stream, flush=True)


def configure_logging(level: str | None = None, *, rank: int | None = None) -> None:
    """Sends the log records of all packages to the console; a second call replaces the first.

    `level` is the name of a `logging` level; by default the one that the parent process has set, or INFO.
    """
    escape_what_cannot_be_written()  # here, as every process of ours configures its logging
    if level is not None:
        os.environ[LEVEL] = level
    known = logging.getLevelNamesMapping()
    handler = _ConsoleHandler(rank)
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(known.get(os.environ.get(LEVEL, ""), logging.INFO))
        logger.propagate = False
    for package in NOISY:
        logging.getLogger(package).setLevel(logging.ERROR)


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module, and configures logging if that has not been done."""
    if not logging.getLogger(PACKAGES[0]).handlers:
        configure_logging()
    return logging.getLogger(name)
