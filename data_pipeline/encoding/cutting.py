"""Cuts long documents into pieces, so that encoding one takes bounded memory and leaves its tokens as they are.

A cut is safe if the tokens of both sides, one after the other, are those of the whole text. Byte-level BPE splits a
text itself after a single line break and before a single space that stand between characters that are not white space.
Other tokenizers put a mark before every text, swallow white space, or merge over it: whether theirs can be cut there is
tried out, on pairs of characters of many kinds and with entries of the vocabulary. A document without a safe place is
one piece, up to LONGEST_PIECE characters.
"""

import re
import string
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from data_pipeline.document import Document, OnBadRow
from data_pipeline.errors import DataError
from data_pipeline.tokenizers.reading import encoded

if TYPE_CHECKING:
    import tokenizers

PIECE_CHARACTERS = 1 << 20  # a longer document is cut where that is safe
LONGEST_PIECE = 1 << 26  # characters
_CUT_WINDOW = 1 << 16  # characters before PIECE_CHARACTERS in which the last place is taken


class TextPiece(NamedTuple):
    """A part of a document that is encoded by itself."""

    text: str  # never empty
    begins_document: bool
    ends_document: bool
    number: int  # of the document in the output
    where: str  # file and line or row of the document, for a sentence


class CutPlace(NamedTuple):
    """A kind of place at which a text may be cut: `offset` characters after the start of what `pattern` finds."""

    name: str
    pattern: re.Pattern[str]
    offset: int


AFTER_LINE = CutPlace("after a line break", re.compile(r"(?<=\S)\n(?=\S)"), 1)
BEFORE_SPACE = CutPlace("before a space", re.compile(r"(?<=\S) (?=\S)"), 0)
CUT_PLACES = (AFTER_LINE, BEFORE_SPACE)
"""All kinds, the best first."""


def cut_document(
    document: Document, number: int, places: Sequence[CutPlace], on_bad_row: OnBadRow
) -> Iterator[TextPiece]:
    """Yields the pieces of one document, none for an empty one; one that is too long to be a piece is a bad row."""
    pending, begins, searched = "", document.begins, PIECE_CHARACTERS
    for block in document.blocks:
        pending += block
        while len(pending) > PIECE_CHARACTERS:
            cut = _cut_position(pending, places, searched)
            if cut is None or cut > LONGEST_PIECE:
                searched = len(pending) - 1  # the last character's place needs the next one
                break
            yield TextPiece(pending[:cut], begins, False, number, document.where)
            pending, begins, searched = pending[cut:], False, PIECE_CHARACTERS
        if len(pending) > LONGEST_PIECE:
            error = cannot_be_cut(document.where)
            if not (begins and document.ends):  # others of its pieces are encoded already, or will be
                raise error
            on_bad_row(error)
            return
    if pending:
        yield TextPiece(pending, begins, document.ends, number, document.where)


def cannot_be_cut(where: str) -> DataError:
    """Returns the sentence about a document that is too long to be one piece."""
    return DataError(
        f"{where} has more than {LONGEST_PIECE:,} characters without a place where it can be cut and keep the tokens "
        "that this tokenizer gives it: make several documents of it"
    )


def _cut_position(text: str, places: Sequence[CutPlace], searched: int) -> int | None:
    """Returns the last place in the window before PIECE_CHARACTERS, or else the first after it; None without.

    No place is at PIECE_CHARACTERS or above and below `searched`, as an earlier call for less of the text has found.
    """
    if searched == PIECE_CHARACTERS:
        for place in places:
            found = [match.start() for match in place.pattern.finditer(text, searched - _CUT_WINDOW, searched)]
            if found:
                return found[-1] + place.offset
    later = [(match.start() + place.offset) for place in places if (match := place.pattern.search(text, searched))]
    return min(later, default=None)


def safe_places(tokenizer: "tokenizers.Tokenizer") -> tuple[CutPlace, ...]:
    """Returns the kinds of places where no cut was found that changes the tokens."""
    from tokenizers.models import Unigram

    if isinstance(tokenizer.model, Unigram):  # sums of scores over the whole text decide
        return ()
    return tuple(place for place in CUT_PLACES if _is_safe(tokenizer, place))


def _is_safe(tokenizer: "tokenizers.Tokenizer", place: CutPlace) -> bool:
    def ids(text: str) -> list[int]:
        return encoded(tokenizer, text).ids

    between = "\n" if place is AFTER_LINE else " "
    around = _pairs(between), _around_added_tokens(tokenizer, between), _around_entries(tokenizer, between)
    for text in chain(*around, _reaching_over(tokenizer, place)):
        cuts = [0, *(match.start() + place.offset for match in place.pattern.finditer(text)), len(text)]
        if [token for start, end in pairwise(cuts) for token in ids(text[start:end])] != ids(text):
            return False
    return True


_WORDS = [
    *"word Word WORD 7 1984 é ß 漢字 かな ไทย 한글 نص हिन्दी текст 🙂 ﬁ ½ 's 'LL".split(),  # noqa: SIM905
    *("e\u0301", "\u0301", "\u200b", "\ufeff", "\x00"),
    *string.punctuation,
]
"""Characters that tokenizers tell apart: cases, digits, scripts with and without spaces, marks, signs, contractions."""


def _pairs(between: str) -> Iterator[str]:
    """Yields texts in which every two of `_WORDS` stand on both sides of a place, also as parts of longer words."""
    for left in _WORDS:
        yield "  ".join(f"{left}{between}{right}  a{left}{between}{right}b1" for right in _WORDS)


def _around_added_tokens(tokenizer: "tokenizers.Tokenizer", between: str) -> Iterator[str]:
    """Yields texts with the tokens that may swallow the white space beside them."""
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or token.single_word:
            yield f"a{between}{token.content}{between}b"
            yield f"a{token.content}{between}{token.content}b"


def _around_entries(tokenizer: "tokenizers.Tokenizer", between: str) -> Iterator[str]:
    """Yields texts in which entries of the vocabulary begin with a sign that a rule may join to what is before a place.

    The entry would then not be found, as "/usr" is not after ".\\n" by GPT-4o's rule.
    """
    entries: dict[str, list[str]] = {}
    for entry in sorted(tokenizer.get_vocab()):
        if entry[:1] in string.punctuation and len(entry) > 1 and entry.isascii():
            entries.setdefault(entry[0], []).append(entry)
    rights = [entry for found in entries.values() for entry in found[:: max(1, len(found) // 8)]]
    for left in ("x", "X", "7", "漢", *string.punctuation):
        yield "  ".join(f"{left}{between}{right}" for right in rights)


def _reaching_over(tokenizer: "tokenizers.Tokenizer", place: CutPlace) -> Iterator[str]:
    """Yields the entries of the vocabulary that contain a place, as their text and as byte-level BPE spells it."""
    for entry, number in tokenizer.get_vocab(with_added_tokens=True).items():
        spelled = f"x{entry.translate(_SPELLING)}x"
        if any(1 < match.start() + place.offset < len(spelled) - 1 for match in place.pattern.finditer(spelled)):
            yield spelled
            yield f"x{tokenizer.decode([number], skip_special_tokens=False)}x"


_SPELLING = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
