"""Token ids, one at a time, as the pieces of text that they add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CUT_CHARACTER = "\ufffd"  # what a tokenizer makes of some bytes of a character


class TextStream:
    """The text of new tokens behind a prompt's, special ones left out.

    A token is decoded together with the tokens before it, whose text is then taken off: alone, many a tokenizer would
    drop the space in front of it. Only so many before it are decoded again as were held back with it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, list(prompt)
        self._first, self._told = 0, len(prompt)  # context from `_first` on; text is told up to `_told`

    def add(self, token: int) -> str:
        """What `token` adds; nothing while it ends in the middle of a character, whose text comes with a later one."""
        self._tokens.append(token)
        text = self._untold()
        if text.endswith(CUT_CHARACTER) or not text:
            return ""
        self._first, self._told = self._told, len(self._tokens)
        return text

    def rest(self) -> str:
        """What is held back, when no token follows."""
        text = self._untold()
        self._first = self._told = len(self._tokens)
        return text

    def _untold(self) -> str:
        context = self._decoded(self._tokens[self._first : self._told])
        return self._decoded(self._tokens[self._first :])[len(context) :]

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
