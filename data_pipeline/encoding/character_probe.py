"""Finds the characters that gigatoken and `tokenizers` take for different things: they know different ages of Unicode.

Where one takes a new letter for a sign, it splits words elsewhere. The entries of a vocabulary seldom show that, so
both libraries read the tokenizer with other entries, by which everything merges over the border of a character. Texts
with such a character are then encoded exactly. So are those with characters that are not probed, because Python does
not know them or their planes hold no letters.
"""

import json
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.encoding.fast_encoder import FastTokenizer
from data_pipeline.errors import DataError
from data_pipeline.tokenizers.reading import encoded

_PROBED = 0x40000  # the planes that hold letters
_BLOCK = 1 << 10  # characters that are compared at once
_NEIGHBOURS = 'aA1" '
_STABLE = 16  # of so many ideographs or syllables in a row one is probed


def parting_characters(tokenizer_json: bytes) -> str:
    """Returns the characters above ASCII that part the libraries, as ranges: first, last, first, last and so on.

    Raises DataError if gigatoken cannot read the tokenizer, or if a character of ASCII parts them, which has no age.
    """
    from tokenizers import Tokenizer

    content = _revealing(tokenizer_json)
    exact, fast = Tokenizer.from_str(content), FastTokenizer(content.encode())

    def part(characters: list[str]) -> bool:
        text = "".join(map(_unit, characters))
        return not np.array_equal(fast.ids(text), np.array(encoded(exact, text).ids, np.uint32))

    plain = next((one for one in map(chr, range(0x80)) if part([one])), None)
    if plain is not None:
        raise DataError(
            f"gigatoken splits or normalizes words at {plain!r} in another way than the tokenizer: prepare with "
            "--encoder exact"
        )
    known = np.array([unicodedata.category(chr(code)) not in ("Cn", "Cs") for code in range(_PROBED)])
    parting = np.concatenate([~known, np.ones(0x110000 - _PROBED, bool)])
    probed = list(_probed(known))
    for start in range(0, len(probed), _BLOCK):
        block = probed[start : start + _BLOCK]
        if part(block):
            parting[[ord(one) for one in block if part([one])]] = True
    borders = np.flatnonzero(np.diff(parting, prepend=False, append=False))
    return "".join(chr(first) + chr(after - 1) for first, after in borders.reshape(-1, 2).tolist())


def holds_any(text: str, ranges: str) -> bool:
    """Tells whether a text holds a character of the ranges, which hold none of ASCII."""
    if text.isascii():
        return False
    return bool(as_table(ranges)[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any())


@lru_cache(maxsize=1)
def as_table(ranges: str) -> NDArray[np.bool_]:
    """Returns the characters of the ranges as an array of shape [0x110000]."""
    table = np.zeros(0x110000, bool)
    for first, last in zip(ranges[::2], ranges[1::2], strict=True):
        table[ord(first) : ord(last) + 1] = True
    return table


def _probed(known: NDArray[np.bool_]) -> Iterator[str]:
    """Yields the known characters; of long runs of letters without case, the first and then one of _STABLE."""
    run = 0
    for code in np.flatnonzero(known).tolist():
        run = run + 1 if unicodedata.category(chr(code)) == "Lo" and known[code - 1] else 0
        if run < _STABLE or run % _STABLE == 0:
            yield chr(code)


def _unit(character: str) -> str:
    """Returns a text that shows whether a character is a letter, a number or a sign, and how it is normalized.

    NFC puts every combining mark before U+0345, and composes U+0301 with the letter unless something stands between.
    """
    apart = unicodedata.normalize("NFD", character)
    text = "".join(f"{neighbour}{character}{neighbour}" for neighbour in _NEIGHBOURS)
    return f"{text}a\u0345{character} a{character}\u0301 {apart if apart != character else ''} "


def _revealing(tokenizer_json: bytes) -> str:
    """Returns a tokenizer with the normalizer and the rules of splitting of another, whose tokens show what they do."""
    from tokenizers import pre_tokenizers

    content: dict[str, Any] = json.loads(tokenizer_json)
    model = content["model"]
    merges: list[list[str]] = []
    if model.get("byte_fallback"):
        entries = [model.get("unk_token") or "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        entries = sorted(pre_tokenizers.ByteLevel.alphabet())
        near = ["Ġ" if neighbour == " " else neighbour for neighbour in _NEIGHBOURS]
        pairs = [[one, other] for one in near for other in entries]
        unique = {left + right: [left, right] for pair in pairs for left, right in (pair, pair[::-1])}
        entries, merges = [*entries, *unique], list(unique.values())
    plain = {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    model |= {"vocab": {entry: number for number, entry in enumerate(entries)}, "merges": merges, **plain}
    return json.dumps(content | {"added_tokens": [], "post_processor": None})
