"""The optional fast encoder: gigatoken reads the same tokenizer.json as `tokenizers`, and encodes with far less CPU.

Whether it gives the same tokens is not taken on trust: encoder_check.py compares both before a `prepare` uses it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.reading import TokenizerFile, UnusableTokenizer

if TYPE_CHECKING:
    import gigatoken

CHARACTERS_PER_LOAD = 1 << 27
"""Characters after which the tokenizer is loaded anew. gigatoken 0.10 keeps every word that it has met, which is about
a byte of memory for each byte of text without repeated words; loading takes 0.1 s to 0.5 s of CPU."""


class FastTokenizer:
    """A tokenizer of gigatoken whose memory is bounded."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Loads the contents of a `tokenizer.json`. Raises DataError if gigatoken cannot read it."""
        self._content = tokenizer_json
        self._load()

    def ids(self, text: str) -> NDArray[np.uint32]:
        """Returns the tokens of `text` as an array of shape [tokens]. Raises UnusableTokenizer if gigatoken breaks."""
        if self._characters_left < 0:
            self._load()
        self._characters_left -= len(text)
        with _one_sentence("cannot encode it"):
            return self._loaded.encode(text)

    def _load(self) -> None:
        from gigatoken import Tokenizer

        with _one_sentence("cannot read the tokenizer"):
            self._loaded: gigatoken.Tokenizer = Tokenizer.from_json(self._content)
        self._characters_left = CHARACTERS_PER_LOAD


@contextmanager
def _one_sentence(problem: str) -> Iterator[None]:
    """Turns what gigatoken raises into a sentence."""
    try:
        yield
    except BaseException as error:  # pyo3's PanicException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = str(error).partition("\n")[0]
        raise UnusableTokenizer(f"gigatoken {problem} ({reason}): prepare with --encoder exact") from error


@lru_cache(maxsize=1)
def fast_tokenizer(file: TokenizerFile, special_as_text: bool) -> FastTokenizer:
    """Loads a tokenizer once per process."""
    tokenizer_json = file.json()
    if special_as_text:
        content = json.loads(tokenizer_json)
        content["added_tokens"] = [token for token in content.get("added_tokens", []) if not token.get("special")]
        tokenizer_json = json.dumps(content).encode()
    return FastTokenizer(tokenizer_json)


def check_installed() -> None:
    """Raises DataError if gigatoken is not installed."""
    if find_spec("gigatoken") is None:
        raise DataError(
            "--encoder fast needs gigatoken, which this Python lacks: pip install 'megalite[fast]', or prepare with "
            "--encoder exact"
        )
