"""Encodes conversations: the tokens of their rendered text, and which of them carry loss."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.chat.control_tokens import BREAK, ControlTokens
from data_pipeline.chat.conversation import USUAL_ROLES, Conversation, conversation_of_json
from data_pipeline.chat.template import ChatTemplate, read_chat_template
from data_pipeline.chat.turns import TrainOn, TurnFinder, Turns
from data_pipeline.encoding.cutting import TextPiece
from data_pipeline.encoding.encoders import EncodedPiece, LoadedTokenizer, SpecialTokens, loaded_tokenizer
from data_pipeline.errors import DataError
from data_pipeline.tokenizers.reading import TokenizerFile, with_limits


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes conversations with a template, which writes all special tokens itself: none is added around it."""

    tokenizer: TokenizerFile
    template: ChatTemplate
    train_on: TrainOn
    special_tokens: SpecialTokens
    begin_token: None = None
    end_of_turn: int | None = field(default=None, compare=False)  # the token by which the template ends an answer
    notice: str | None = field(default=None, compare=False)  # about the template

    def encode(self, piece: TextPiece) -> EncodedPiece:
        """Encodes the conversation that a piece holds as JSON. Raises DataError if it cannot say what carries loss."""
        tools, given = _tools(self), conversation_of_json(piece.text)
        self._check_roles(given, piece.where)
        conversation = tools.control_tokens.apart(given, piece.where)
        turns = tools.turns.find(conversation, piece.where)
        tokens = tools.text.tokens(turns.text)
        if self.special_tokens != "keep":
            neutral = tools.turns.text_of(tools.control_tokens.neutral(conversation), piece.where)
            tools.control_tokens.check_rendered(tokens.ids, tools.text.tokens(neutral).ids, piece.where)
        loss = np.zeros(len(tokens.ids), dtype=np.uint8)
        for begin, end in turns.trained:
            first = int(tokens.ends.searchsorted(begin, side="right"))
            if not (first and loss[first - 1]):  # what goes on from a stretch that carries loss answers nothing
                tools.text.check_prompt(turns, tokens, first, begin, piece.where)
            loss[first : int(tokens.starts.searchsorted(end))] = 1
        if loss.all() or not loss.any():
            carry = "all tokens carry" if loss.any() else "no token carries"
            raise DataError(
                f"{piece.where}: with the chat template of {self.template.folder} {carry} loss: mark what the "
                "assistant writes, and nothing else, by {% generation %} in the template, or leave the conversation out"
            )
        return EncodedPiece(tokens.ids, loss)

    def _check_roles(self, conversation: Conversation, where: str) -> None:
        """Raises DataError for a role that is not usual, unless the template names it: it is probably misspelt."""
        program = self.template.program(bool(conversation.tools))
        for number, message in enumerate(conversation.messages, start=1):
            if message["role"] not in USUAL_ROLES and message["role"] not in program:
                raise DataError(
                    f"{where}, message {number} has the role {message['role']!r}, which the chat template of "
                    f"{self.template.folder} does not name: write one of {', '.join(USUAL_ROLES)}"
                )


class _Tokens(NamedTuple):
    ids: list[int]
    starts: NDArray[np.int64]  # [ids] first character of each token
    ends: NDArray[np.int64]  # [ids] and the one after its last


class _ChatText:
    """Tokenises rendered text, with control tokens that are text cut in two."""

    def __init__(self, words: LoadedTokenizer) -> None:
        self._words, self._special = words, frozenset(words.special)

    def tokens(self, text: str) -> _Tokens:
        """Encodes rendered text without adding special tokens: a template writes its own."""
        ids: list[int] = []
        places: list[NDArray[np.int64]] = []
        begin = 0
        for part in text.split(BREAK):
            found, offsets = self._words.spans(part)
            ids += found
            places.append(np.fromiter(chain.from_iterable(offsets), np.int64) + begin)
            begin += len(part) + len(BREAK)
        starts, ends = np.concatenate(places).reshape(-1, 2).T
        return _Tokens(ids, starts, ends)

    def check_prompt(self, turns: Turns, tokens: _Tokens, first: int, begin: int, where: str) -> None:
        """Raises DataError unless the tokens up to number `first` are those of the text up to character `begin`.

        Special tokens cut a text in any tokenizer, so only the text from the last of them on is encoded again.
        """
        cut = next((number for number in reversed(range(first)) if tokens.ids[number] in self._special), 0)
        place = int(tokens.starts[cut]) if cut else 0
        if self.tokens(turns.text[place:begin]).ids != tokens.ids[cut:first]:
            around = turns.text[max(place, begin - 8) : begin + 8]
            remedy = (
                "take the white space away from its beginning"
                if turns.text[begin : begin + 1].isspace()
                else "let the template end its prompt without white space, or with one line break"
            )
            raise DataError(
                f"{where}: the tokens of a prompt are others where its answer follows, in {around!r}, so that a model "
                f"would not learn to continue the prompt: {remedy}"
            )


class _Tools(NamedTuple):
    """The parts of an encoder that a process makes once."""

    control_tokens: ControlTokens
    turns: TurnFinder
    text: _ChatText


@lru_cache(maxsize=1)
def _tools(encoder: ChatEncoder) -> _Tools:
    words = loaded_tokenizer(encoder.tokenizer, False)
    turns = TurnFinder(encoder.template, list(words.special.values()), encoder.train_on)
    return _Tools(ControlTokens(words, encoder.template, encoder.special_tokens, turns), turns, _ChatText(words))


def chat_encoder(
    tokenizer: TokenizerFile, train_on: TrainOn, special_tokens: SpecialTokens, date: str | None = None
) -> ChatEncoder:
    """Returns the encoder of a tokenizer's folder. Raises DataError if it has no chat template, or not for this."""
    encoder = ChatEncoder(tokenizer, read_chat_template(tokenizer.path.parent, date), train_on, special_tokens)
    end, notice = with_limits(tokenizer, lambda: _tried_out(encoder))
    return replace(encoder, end_of_turn=end, notice=notice)


def _tried_out(encoder: ChatEncoder) -> tuple[int | None, str | None]:
    """Returns the token that ends a turn, and the notice about the template.

    Raises DataError for a tokenizer that does not do what is asked of it.
    """
    loaded = loaded_tokenizer(encoder.tokenizer, False)
    _tools(encoder).turns.check_template()
    if encoder.special_tokens == "as-text":
        halves = [loaded.spans(half)[0] for half in ("a<", "|b")]
        if loaded.tokenizer.decode([*halves[0], *halves[1]]) != "a<|b":
            raise DataError(
                f"the tokenizer {encoder.tokenizer.given} begins each text with a space, so that no control token can "
                "be cut in two to become text: choose --special-tokens refuse or keep"
            )
    end = _tools(encoder).turns.end_of_turn()  # control tokens that cannot become text are refused here
    return None if end is None else loaded.tokenizer.token_to_id(end), _tools(encoder).turns.opening_notice()
