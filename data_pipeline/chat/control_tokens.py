"""Keeps the text of a conversation from being read as the tokens that separate its turns.

A message may spell `<|im_end|>`; rendered and tokenised, it would end the turn that it stands in, and what follows it
could begin another in any role. A control token is a special token of the tokenizer, in any message. In a message that
is not the assistant's, it is also any added token that the template writes itself, such as DeepSeek's `<｜User｜>`,
which is not special. An assistant's own may hold these, unless the template writes them in the turns of others
or to begin an answer: reasoning stands between `<think>` and `</think>`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from data_pipeline.chat.conversation import ASSISTANT, Conversation
from data_pipeline.chat.template import ChatTemplate
from data_pipeline.chat.turns import TurnFinder, common_length
from data_pipeline.encoding.encoders import LoadedTokenizer, SpecialTokens
from data_pipeline.errors import DataError
from data_pipeline.tokenizers.reading import HubTokenizer

BREAK = "\ufdd0"  # stands inside a control token that is text; a code point that no text may contain
_NAMES = {"role", "type", "name", "id", "tool_call_id"}  # fields by which templates choose what to write


class _Forbidden(NamedTuple):
    """Tokens that a message must not hold."""

    spellings: re.Pattern[str]
    ids: frozenset[int]


class ControlTokens:
    """The control tokens of a tokenizer with a template. Raises DataError for a policy that they do not allow."""

    def __init__(
        self, words: LoadedTokenizer | HubTokenizer, template: ChatTemplate, policy: SpecialTokens, turns: TurnFinder
    ) -> None:
        self.policy = policy
        self._words, self._template = words, template
        self._added = {number: content for number, (content, _) in words.added.items()}
        special = {number for number, (_, is_special) in words.added.items() if is_special}
        programs = template.text + template.tool_text
        written = {number for number, token in self._added.items() if token in programs and token.strip()}
        around = set() if policy == "keep" else self._around_answers(turns) & written
        self._in_answers, self._elsewhere = self._forbidden(special | around), self._forbidden(special | written)
        self._harmless = _any_of([token for number, token in self._added.items() if number not in special])
        short = [token for number, token in self._added.items() if number in self._elsewhere.ids and len(token) < 2]
        if policy == "as-text" and short:
            raise DataError(
                f"{template.folder}: its control token {short[0]!r} is one character, which cannot be cut in two to "
                "become text: choose --special-tokens refuse or keep"
            )

    def apart(self, conversation: Conversation, where: str) -> Conversation:
        """Returns the conversation with every control token in it refused, kept or broken, as the policy says."""
        if self.policy == "keep":
            return conversation
        messages = [
            self._of(message, message["role"] == ASSISTANT, f"{where}, message {number}")
            for number, message in enumerate(conversation.messages, start=1)
        ]
        tools = self._of(conversation.tools, False, f"{where}, tools")
        return conversation._replace(messages=messages, tools=tools)

    def spelled_by_user(self, text: str) -> str | None:
        """Returns the first control token that a message of a user spells, as it is spelled; None if there is none."""
        span = self._first(text, 0, self._elsewhere)
        return text[slice(*span)] if span else None

    def forged_in(self, ids: Sequence[int], neutral: Sequence[int]) -> str | None:
        """Returns a control token that a rendered conversation has, and the same with neutral texts has not, or None.

        ids, neutral: tokens of the two.
        """
        counts = [Counter(number for number in made if number in self._in_answers.ids) for made in (ids, neutral)]
        forged = counts[0] - counts[1]
        return self._added[next(iter(forged))] if forged else None

    def check_rendered(self, ids: Sequence[int], neutral: Sequence[int], where: str) -> None:
        """Raises DataError if a rendered conversation has control tokens that the same with neutral texts has not."""
        if forged := self.forged_in(ids, neutral):
            raise DataError(
                f"{where}: what the chat template of {self._template.folder} makes of its messages has "
                f"{forged!r} where the template writes none by itself, so that a message "
                "forges a turn: leave the conversation out, or choose --special-tokens keep if it is meant so"
            )

    def neutral(self, conversation: Conversation) -> Conversation:
        """Returns the conversation with short texts in place of its own; reasoning and calls stay where they are."""
        neutral = [_mapped(value, self._neutral_text) for value in (conversation.messages, conversation.tools)]
        return conversation._replace(messages=neutral[0], tools=neutral[1])

    def _neutral_text(self, text: str) -> str:
        kept = self._harmless.findall(text)
        words = [re.sub(r"\S(.*\S)?", "x", between, flags=re.DOTALL) for between in self._harmless.split(text)]
        return words[0] + "".join(token + word for token, word in zip(kept, words[1:], strict=True))

    def _around_answers(self, turns: TurnFinder) -> set[int]:
        """Returns the added tokens in the turns of others, and the one that begins the assistant's.

        What a prompt has behind that one, as `<think>`, is the beginning of an answer.
        """
        found = []
        for text, longer in turns.around_answers():
            before, after = self._ids(text), self._ids(longer)
            same = common_length(before, after)
            found.append([number for number in after[same:] if number in self._added])
        return {number for numbers in found[:-1] for number in numbers} | set(found[-1][:1])

    def _ids(self, text: str) -> list[int]:
        return self._words.spans(text)[0]

    def _forbidden(self, ids: set[int]) -> _Forbidden:
        return _Forbidden(_any_of([self._added[number] for number in ids]), frozenset(ids))

    def _of(self, value: Any, is_answer: bool, where: str) -> Any:
        tokens = self._in_answers if is_answer else self._elsewhere
        if any(BREAK in text for text in _texts(value)):
            raise DataError(f"{where} contains U+FDD0, which is no character: take it out")
        spans = ((text, span) for text in _texts(value) if (span := self._first(text, 0, tokens)))
        first = next(spans, None)
        if first is None:
            return value
        if self.policy == "refuse":
            text, (begin, end) = first
            raise DataError(
                f"{where} contains {text[begin:end]!r}, which would be read as a token of the template: take it out, "
                "or choose --special-tokens as-text, or keep if it is meant as one"
            )
        return _mapped(value, lambda text: self._broken(text, tokens, where), names=True)

    def _first(self, text: str, place: int, tokens: _Forbidden) -> tuple[int, int] | None:
        """Returns begin and end of the first control token in `text` from `place` on, as the tokenizer reads it.

        It finds no others than those that are spelled, unless it normalises: `<|IM_END|>` may be one then.
        """
        match = tokens.spellings.search(text, place)
        if match or not self._words.normalizes:
            return match.span() if match else None
        found = (span for number, span in zip(*self._words.spans(text[place:]), strict=True) if number in tokens.ids)
        return next(((place + begin, place + end) for begin, end in found), None)

    def _broken(self, text: str, tokens: _Forbidden, where: str) -> str:
        """Returns the text with every control token in it cut behind its first character."""
        parts, place = [], 0
        while span := self._first(text, place, tokens):
            begin, end = span
            if end - begin < 2:
                raise DataError(
                    f"{where} contains {text[begin:end]!r}, which the tokenizer reads as a control token, and which "
                    "cannot be cut in two to become text: take it out"
                )
            parts.append(text[place : begin + 1])
            place = begin + 1
        return BREAK.join([*parts, text[place:]])


def _any_of(tokens: list[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # which matches nothing


def _texts(value: Any) -> Iterator[str]:
    """Yields every text in a value of JSON, the names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _mapped(value: Any, change: Callable[[str], str], *, names: bool = False) -> Any:
    """Returns a value of JSON with every text in it changed; those that name something only with `names`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            change(name) if names else name: inner
            if name in _NAMES and not names
            else _mapped(inner, change, names=names)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_mapped(inner, change, names=names) for inner in value]
    return value
