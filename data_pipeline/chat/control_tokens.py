"""Keeps the text of a conversation from being read as the tokens that separate its turns.

A message may spell `<|im_end|>`; rendered and tokenised, it would end the turn that it stands in, and what follows it
could begin another in any role. A control token is a special token of the tokenizer, in any message. In a message that
is not the assistant's, it is also any added token that the template writes itself, such as DeepSeek's `<｜User｜>`,
which is not special. An assistant's own may hold these: reasoning stands between `<think>` and `</think>`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from data_pipeline.chat.conversation import ASSISTANT, Conversation
from data_pipeline.chat.template import ChatTemplate
from data_pipeline.errors import DataError
from data_pipeline.prepare.encoding import SpecialTokens

BREAK = "\ufdd0"  # stands inside a control token that is text; a code point that no text may contain


class ControlTokens:
    """The control tokens of a tokenizer with a template. `added` says of each added token whether it is special."""

    def __init__(self, added: Mapping[str, bool], template: ChatTemplate, policy: SpecialTokens) -> None:
        self.policy = policy
        programs = template.text + template.tool_text
        special = [token for token, is_special in added.items() if is_special]
        written = [token for token in added if token in programs and token.strip()]
        self._in_answers, self._elsewhere = _any_of(special), _any_of([*special, *written])

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

    def _of(self, value: Any, is_answer: bool, where: str) -> Any:
        tokens = self._in_answers if is_answer else self._elsewhere
        if not any(tokens.search(text) or BREAK in text for text in _texts(value)):
            return value
        if any(BREAK in text for text in _texts(value)):
            raise DataError(f"{where} contains U+FDD0, which is no character: take it out")
        found = next(match[0] for text in _texts(value) if (match := tokens.search(text)))
        if self.policy == "refuse":
            raise DataError(
                f"{where} contains {found!r}, which would be read as a token of the template: take it out, or choose "
                "--special-tokens as-text, or keep if it is meant as one"
            )
        return _mapped(value, lambda text: tokens.sub(lambda match: match[0][:1] + BREAK + match[0][1:], text))


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


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a value of JSON with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value
