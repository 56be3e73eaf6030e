"""Ends a worker process whose tokenizer takes too much time or memory for a piece of text.

Encoding cannot be stopped, only its process. A thread looks ten times a second at what the process has used since it
saw the piece first; a piece that is done within that time costs nothing. Encoding lets it run (`encoded`).
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Array, c_char

import psutil

from data_pipeline.encoding.cutting import TextPiece
from data_pipeline.tokenizers.reading import CHARACTERS_PER_S, MEMORY_BYTES, PROCESSOR_S

LAST_WORDS = 2000  # bytes
_LOOK_EVERY_S = 0.1
_BYTES_PER_CHARACTER = 1000  # a legitimate tokenizer takes a fifth of it
_current: TextPiece | None = None  # the piece that this process encodes


@contextmanager
def watched(piece: TextPiece) -> Iterator[None]:
    """Lets a piece be watched, if `watch_pieces` has been called in this process."""
    global _current
    _current = piece
    try:
        yield
    finally:
        _current = None


def watch_pieces(last_words: "Array[c_char]") -> None:
    """Starts to watch; before this process ends for a piece, `last_words` says why."""
    # what Rust prints when it breaks is no news: the error of it becomes a sentence
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    threading.Thread(target=_watch, args=(last_words,), daemon=True).start()


def _watch(last_words: "Array[c_char]") -> None:
    known: TextPiece | None = None
    began_s, began_bytes = 0.0, 0
    while True:
        time.sleep(_LOOK_EVERY_S)
        piece = _current
        used_s, used_bytes = time.process_time(), psutil.Process().memory_info().rss
        if piece is not known:
            known, began_s, began_bytes = piece, used_s, used_bytes
        elif piece is not None and (why := _excess(len(piece.text), used_s - began_s, used_bytes - began_bytes)):
            words = f"{piece.where}: a piece of {len(piece.text):,} characters took {why}"
            last_words.value = words.encode()[: LAST_WORDS - 1]
            os._exit(1)


def _excess(characters: int, seconds: float, memory: int) -> str:
    most_s = PROCESSOR_S + characters / CHARACTERS_PER_S
    most_bytes = MEMORY_BYTES // 2 + _BYTES_PER_CHARACTER * characters
    if seconds > most_s:
        return f"more than {most_s:.0f} s"
    return f"more than {most_bytes / 1e9:.1f} GB of memory" if memory > most_bytes else ""
