"""Fill-in-the-middle: documents whose middle stands last, from which a model learns to write between two texts.

A chosen document is cut at two characters and written in one of two orders, each half of the time:

    PREFIX prefix SUFFIX suffix MIDDLE middle
    PREFIX SUFFIX suffix MIDDLE prefix middle

PREFIX, SUFFIX and MIDDLE are special tokens of the tokenizer. Choice, cuts and order follow from the
document's number.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_pipeline.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_KNOWN_TOKENS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # DeepSeek: the suffix is in the hole
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
)


@dataclass(frozen=True)
class FillInTheMiddle:
    """The share of documents that are rearranged, and the tokens between their parts."""

    rate: float
    prefix: int
    suffix: int
    middle: int

    def arranged(self, text: str, number: int) -> list[int | str]:
        """Returns the tokens and texts of document `number`, in order; the text alone if it stays as it is."""
        digest = hashlib.blake2b(f"fill in the middle of document {number}".encode(), digest_size=32).digest()
        chosen, one, other, order = struct.unpack("<4Q", digest)
        if chosen >= self.rate * 2**64:
            return [text]
        start, end = sorted(place % (len(text) + 1) for place in (one, other))
        prefix, middle, suffix = text[:start], text[start:end], text[end:]
        if order % 2:
            return [self.prefix, prefix, self.suffix, suffix, self.middle, middle]
        return [self.prefix, self.suffix, suffix, self.middle, prefix, middle]


def fill_in_the_middle(rate: float, tokenizer: "tokenizers.Tokenizer", given: str) -> FillInTheMiddle:
    """Returns the rearrangement with the special tokens of the tokenizer. Raises DataError if it has none."""
    if _is_after_a_space("b", tokenizer):
        raise DataError(
            f"tokenizer {given} puts a space before every text, so that the parts of a document would not join: "
            "prepare without --fill-in-the-middle"
        )
    for names in _KNOWN_TOKENS:
        prefix, suffix, middle = map(tokenizer.token_to_id, names)
        if prefix is not None and suffix is not None and middle is not None:
            return FillInTheMiddle(rate, prefix, suffix, middle)
    raise DataError(
        f"tokenizer {given} has no tokens such as {', '.join(_KNOWN_TOKENS[0])}: prepare without --fill-in-the-middle, "
        "or take a tokenizer of a code model"
    )


def _is_after_a_space(text: str, tokenizer: "tokenizers.Tokenizer") -> bool:
    """True if the tokenizer puts a space before a text; whether it has tokens for the text does not matter."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is not None:
        text = "".join(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return text.startswith((" ", "▁", "Ġ"))
