"""Puts a user's messages and a model's answers into a tokenizer's chat template, for the next answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Self

from data_pipeline.chat.control_tokens import ControlTokens
from data_pipeline.chat.conversation import ASSISTANT, USER, Conversation, Message
from data_pipeline.chat.renderer import ChatPart, TemplateLimit, TemplateRefusal
from data_pipeline.chat.template import chat_template_of
from data_pipeline.chat.turns import TurnFinder
from data_pipeline.tokenizers.reading import HubTokenizer
from launch.errors import LaunchError


class Dialogue:
    """A conversation with a model, as its tokenizer's chat template renders it.

    Use it as a context: the template runs in a process of its own. A message that has control tokens, which would forge
    turns, is refused and leaves the conversation as it was.
    """

    def __init__(self, tokenizer: HubTokenizer, folder: Path) -> None:
        """`folder` is that of the model, for messages.

        Raises LaunchError if there is no template, if it takes more time or memory than the renderer allows, or if it
        does not take a user's message.
        """
        if tokenizer.templates is None:
            raise LaunchError(f"{folder}: its tokenizer has no chat template: leave out --chat")
        template = chat_template_of(tokenizer, date.today().isoformat())
        special = [content for content, is_special in tokenizer.added.values() if is_special]
        self._tokenizer, self._folder = tokenizer, folder
        self._turns, self._said = TurnFinder(template, special, "all-turns"), list[Message]()
        try:
            self._tokens(_asking([], "a"))  # first: a template that cannot be used says so
            self._control = ControlTokens(tokenizer, template, "refuse", self._turns)
            end, self.notice = self._turns.end_of_turn(), self._turns.opening_notice()
        except BaseException:
            self._turns.process.close()
            raise
        self.end_of_turn = frozenset(number for number, (content, _) in tokenizer.added.items() if content == end)
        """The token by which the template ends an answer; empty if it writes none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._turns.process.close()

    def ask(self, message: str, name: str = "the prompt") -> list[int]:
        """Returns the conversation so far and `message`, as tokens, with the prompt for its answer.

        Raises LaunchError for a message that forges a turn, or that the template refuses.
        """
        chat = _asking(self._said, message)
        ids = self._tokens(chat)
        forged = self._control.spelled_by_user(message)
        forged = forged or self._control.forged_in(ids, self._tokens(self._control.neutral(chat)))
        if forged:
            raise LaunchError(
                f"{name} has {forged!r}, which the model would read as a token of its chat template, such as one "
                "that begins a turn: take it out"
            )
        return ids

    def answered(self, message: str, answer: str) -> None:
        """Adds a message and its answer to the conversation."""
        self._said += [{"role": USER, "content": message}, {"role": ASSISTANT, "content": answer}]

    def _tokens(self, chat: Conversation) -> list[int]:
        try:
            part = ChatPart(len(chat.messages), add_generation_prompt=True)
            text = self._turns.process.render(chat.messages, [part])[0].text
        except TemplateLimit as error:
            problem = f"{self._folder}: its chat template cannot be used, {error}: leave out --chat"
            raise LaunchError(problem) from None
        except TemplateRefusal as error:
            what = "conversation of this form" if self._said else "message of a user alone"
            raise LaunchError(f"{self._folder}: its chat template takes no {what}: {error}") from None
        ids = self._tokenizer.ids(text, with_special=False)
        if not ids:
            raise LaunchError(f"{self._folder}: its chat template makes nothing of a user's message: leave out --chat")
        return ids


def _asking(said: Sequence[Message], message: str) -> Conversation:
    messages = [*said, {"role": USER, "content": message}]
    return Conversation(messages, None, len(messages))
