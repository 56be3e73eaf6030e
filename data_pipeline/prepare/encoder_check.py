"""Compares the fast encoder with the exact one before a `prepare` uses it, token for token.

The texts are the beginnings of the user's own sources, SAMPLE_CHARACTERS in all, and texts made to show differences:
characters of every script, white space, numbers, added tokens in words, and the entries of the vocabulary. A
tokenizer that gigatoken reads in another way than `tokenizers` is refused; single characters that they take for
different things (character_probe.py) are left to the exact one. The cost has a bound: a few megabytes of text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product

import numpy as np
from numpy.typing import NDArray

from data_pipeline.encoding.character_probe import as_table, parting_characters
from data_pipeline.encoding.encoders import TextEncoder, loaded_tokenizer
from data_pipeline.encoding.fast_encoder import fast_tokenizer
from data_pipeline.errors import DataError
from data_pipeline.sources import Source
from data_pipeline.sources.remote_file import RemoteFile
from data_pipeline.sources.stretch import WHOLE, Stretch
from data_pipeline.tokenizers.reading import encoded

SAMPLE_CHARACTERS = 1 << 20
_SMALLEST_SHARE = 1 << 12  # characters of a source; less of each would open more files than the check is worth
_ENTRIES = 1 << 18  # of the vocabulary, at most
_SHOWN = 30  # characters around a difference


def fast_encoder(exact: TextEncoder, sources: Sequence[Source]) -> TextEncoder:
    """Returns the encoder with gigatoken in it. Raises DataError, with the place, if that gives a text other tokens."""
    fast_tokenizer(*exact.loading)  # refuses what it cannot read
    fast = replace(exact, fast_except=parting_characters(exact.tokenizer.json()))
    for where, text in (*_difficult_texts(exact, fast.fast_except or ""), *sample(sources)):
        expected = exact.ids(text)
        try:
            found = fast.ids(text)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if not np.array_equal(found, expected):
            raise DataError(
                f"gigatoken {version('gigatoken')} gives {where} other tokens than the tokenizer "
                f"{exact.tokenizer.given} has for it, at {_difference(exact, found, text)!r}: prepare with "
                "--encoder exact"
            )
    return fast


def _difference(exact: TextEncoder, found: NDArray[np.uint32], text: str) -> str:
    """Returns the characters around the first token that differs."""
    encoding = encoded(loaded_tokenizer(*exact.loading).tokenizer, text, offsets=True)
    pairs = zip(encoding.ids, found.tolist(), strict=False)
    number = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(encoding), len(found)))
    start = encoding.offsets[number][0] if number < len(encoding) else len(text)
    return text[max(0, start - _SHOWN // 2) : start + _SHOWN]


def sample(sources: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """Yields places and texts, SAMPLE_CHARACTERS in all, or everything if the sources hold less.

    Sources from all over the list give equal shares, the small ones first, so that larger ones make up for them.
    """
    step = max(1, -(-len(sources) * _SMALLEST_SHARE // SAMPLE_CHARACTERS))
    spread = [source for number, source in enumerate(sources) if number % step == 0]
    others = [source for number, source in enumerate(sources) if number % step]
    left = SAMPLE_CHARACTERS
    for group in (spread, others):
        ordered = sorted(group, key=lambda source: float("inf") if source.size_bytes is None else source.size_bytes)
        for number, source in enumerate(ordered):
            share = max(-(-left // (len(ordered) - number)), min(left, _SMALLEST_SHARE))
            for where, text in _beginning(source, share):
                yield where, text
                left -= len(text)
            if left <= 0:
                return


def _beginning(source: Source, characters: int) -> Iterator[tuple[str, str]]:
    """Yields the first documents of a source, the last one cut short. Bad rows are left to the run itself."""
    beginning = Stretch(0, None, characters) if isinstance(source.path, RemoteFile) else WHOLE  # fetches little more
    for document in source.documents(lambda error: None, beginning):
        parts, length = [], 0
        for block in document.blocks:
            parts.append(block[: characters - length])
            length += len(parts[-1])
            if length == characters:
                break
        if length:
            yield f"the text of {document.where}", "".join(parts)
        characters -= length
        if not characters:
            return


def _difficult_texts(encoder: TextEncoder, parting: str) -> Iterator[tuple[str, str]]:
    """Yields the names and texts of the check itself, without the characters that are encoded exactly anyway."""
    exact = loaded_tokenizer(*encoder.loading).tokenizer
    yield "an empty text", ""
    plain = ~as_table(parting)
    for start in range(0, 0x20000, 0x1000):
        codes = np.flatnonzero(plain[start : start + 0x1000])[:: 16 if 0x3400 <= start < 0xD800 else 1]
        text = "".join(f"a{chr(start + code)}1 {chr(start + code)}" for code in codes.tolist())
        yield f"the characters from U+{start:04X}", text
    spaces = ["".join(three) for three in product(_SPACES, repeat=3)]
    yield "white space between words", "".join(f"{left}{space}" for space in spaces for left in ("a", "1", ".", "漢"))
    for text in (" ", "  a", "a  ", "\n a\n", "\r\n\r\na\r\n", "\ta"):
        yield f"the text {text!r}", text
    for text in _LONG:
        yield f"a long run of {text[:12]!r}", text * (30_000 // len(text))
    yield "numbers", " ".join(str(7**power)[:length] for power in range(1, 80) for length in range(1, 9))
    ends = [f"x{mark}{end}" for mark in "'\u2019" for end in _ENDS]
    yield "contractions", "".join(f"{end} {end}y{end}." for end in ends)
    added = (token.content for token in exact.get_added_tokens_decoder().values())
    around = (f"a{one}b {one} {one}{one}\n{one}\n{one.lower()} {one[:-1]} \t{one}\t" for one in added)
    yield "added tokens", "".join(around)
    entries = [exact.decode([number], skip_special_tokens=False) for number in range(exact.get_vocab_size())[:_ENTRIES]]
    yield "the entries of the vocabulary, one after the other", "".join(entries)
    yield "the entries of the vocabulary with spaces between", " ".join(entries)


_SPACES = " \n\r\t\x0b\x0c\x85\xa0\u2003\u2028\u3000\u200b"
_LONG = (
    *("a", "ab1", "0123456789", "=", " ", "\n", " \n", "\t", "\x00"),
    *("漢", "汉字没有空格。", "ก", "e\u0301", "\u0301", "👩\u200d👩\u200d👧"),
)
_ENDS = ("s", "S", "t", "re", "RE", "ve", "m", "ll", "Ll", "d", "x", "\u017f")
