"""Encoders make token ids of a piece of text: frozen values that travel to every worker process of `prepare`.

A document may contain the spelling of a special token, `<|endoftext|>` in a page about tokenizers. What becomes of it
is a choice (`SpecialTokens`); the tokens that begin and end a document are set here, by id, and never by a text.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.encoding.character_probe import holds_any
from data_pipeline.encoding.cutting import TextPiece
from data_pipeline.encoding.fast_encoder import fast_tokenizer
from data_pipeline.encoding.fill_in_the_middle import FillInTheMiddle
from data_pipeline.errors import DataError
from data_pipeline.tokenizers.reading import TokenizerFile, encoded

if TYPE_CHECKING:
    import tokenizers

SpecialTokens = Literal["keep", "as-text", "refuse"]
"""keep: the special token, as the tokenizer reads it; as-text: the tokens of its letters; refuse: DataError."""
EncoderName = Literal["exact", "fast"]
"""exact: the library `tokenizers`; fast: gigatoken, which gives the same tokens or is refused."""


class EncodedPiece(NamedTuple):
    """The tokens of one piece."""

    ids: list[int] | NDArray[np.uint32]
    loss: NDArray[Any] | None  # [ids] uint8, 1 where a token carries loss; None: every token does


@dataclass(frozen=True)
class TextEncoder:
    """Encodes plain text; a token of None is not written."""

    tokenizer: TokenizerFile
    begin_token: int | None
    end_token: int | None
    special_tokens: SpecialTokens
    fill_in_the_middle: FillInTheMiddle | None = None
    fast_except: str | None = None  # ranges of characters whose texts are encoded exactly; None: all are

    def encode(self, piece: TextPiece) -> EncodedPiece:
        """Returns the tokens of the piece, with those around its document. Raises DataError for refused text."""
        parts: list[int | str] = [piece.text]
        if self.fill_in_the_middle is not None and piece.begins_document and piece.ends_document:
            parts = self.fill_in_the_middle.arranged(piece.text, piece.number)
        arrays = [
            np.array([part], np.uint32) if isinstance(part, int) else self._ids_of(part, piece.where) for part in parts
        ]
        if piece.begins_document and self.begin_token is not None:
            arrays.insert(0, np.array([self.begin_token], np.uint32))
        if piece.ends_document and self.end_token is not None:
            arrays.append(np.array([self.end_token], np.uint32))
        return EncodedPiece(np.concatenate(arrays), None)

    def ids(self, text: str) -> NDArray[np.uint32]:
        """Returns the tokens of a text alone, as an array of shape [tokens]."""
        if self.fast_except is not None and not holds_any(text, self.fast_except):
            return fast_tokenizer(*self.loading).ids(text)
        return np.array(encoded(loaded_tokenizer(*self.loading).tokenizer, text).ids, np.uint32)

    def _ids_of(self, text: str, where: str) -> NDArray[np.uint32]:
        ids = self.ids(text)
        if self.special_tokens == "refuse":
            special = loaded_tokenizer(*self.loading).special
            found = ids[np.isin(ids, list(special))]
            if len(found):
                raise DataError(
                    f"{where} contains the special token {special[int(found[0])]!r}: take it out, or choose "
                    "--special-tokens as-text or keep"
                )
        return ids

    @property
    def loading(self) -> tuple[TokenizerFile, bool]:
        """The arguments of `loaded_tokenizer`."""
        return self.tokenizer, self.special_tokens == "as-text"


class LoadedTokenizer(NamedTuple):
    """A tokenizer in memory, and the spelling of each of its special tokens by id."""

    tokenizer: "tokenizers.Tokenizer"
    special: dict[int, str]

    @property
    def added(self) -> dict[int, tuple[str, bool]]:
        """The spelling of each added token by its id, and whether it is special."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {number: (token.content, token.special) for number, token in added.items()}

    @property
    def normalizes(self) -> bool:
        """True if texts are changed before they are read."""
        return self.tokenizer.normalizer is not None

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of a text, and where each begins and ends in it."""
        encoding = encoded(self.tokenizer, text, offsets=True)
        return encoding.ids, encoding.offsets


@lru_cache(maxsize=1)
def loaded_tokenizer(file: TokenizerFile, special_as_text: bool) -> LoadedTokenizer:
    """Loads a tokenizer once per process."""
    loaded = file.load()
    loaded.encode_special_tokens = special_as_text
    added = loaded.get_added_tokens_decoder()
    return LoadedTokenizer(loaded, {number: token.content for number, token in added.items() if token.special})


def check_as_text(file: TokenizerFile, loaded: LoadedTokenizer) -> None:
    """Raises DataError if a special token cannot be written as text: its spelling is an entry of the vocabulary too."""
    for number, content in loaded.special.items():
        if number in encoded(loaded.tokenizer, content).ids:
            raise DataError(
                f"tokenizer {file.given} has no other tokens for the text {content!r} than the special token: choose "
                "--special-tokens keep or refuse"
            )
