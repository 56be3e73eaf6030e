"""Puts a user's messages into a tokenizer's chat template, to be answered by a model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from data_pipeline.chat.control_tokens import ControlTokens
from data_pipeline.chat.conversation import USER, Conversation
from data_pipeline.chat.renderer import ChatPart, TemplateLimit, TemplateProcess, TemplateRefusal
from data_pipeline.chat.template import chat_template_of
from data_pipeline.chat.turns import TurnFinder
from data_pipeline.tokenizer_reading import HubTokenizer
from launch.errors import LaunchError


class ChatPrompts(NamedTuple):
    """Messages as a model is asked to answer them."""

    tokens: list[list[int]]  # of each message, with the prompt for its answer
    end_of_turn: frozenset[int]  # the token by which the template ends an answer; empty if it writes none


def chat_prompts(tokenizer: HubTokenizer, messages: Sequence[str], folder: Path) -> ChatPrompts:
    """Renders each message, as a user's only one, with the chat template of a model's tokenizer.

    folder: of the model, for sentences. Raises LaunchError if there is no template, if it refuses the messages or takes
    more time or memory than the renderer allows, or if a message has control tokens, which would forge turns.
    """
    if tokenizer.templates is None:
        raise LaunchError(f"{folder}: its tokenizer has no chat template: leave out --chat")
    template = chat_template_of(tokenizer, date.today().isoformat())
    special = [content for content, is_special in tokenizer.added.values() if is_special]
    turns = TurnFinder(template, special, "all-turns")

    def tokens(chat: Conversation) -> list[int]:
        ids = tokenizer.ids(_prompt(turns.process, chat, folder), with_special=False)
        if not ids:
            raise LaunchError(f"{folder}: its chat template makes nothing of a user's message: leave out --chat")
        return ids

    try:
        chats = [Conversation([{"role": USER, "content": message}], None, 1) for message in messages]
        made = [tokens(chat) for chat in chats]  # first: a template that cannot be used says so
        control = ControlTokens(tokenizer, template, "refuse", turns)
        for number, (message, chat, ids) in enumerate(zip(messages, chats, made, strict=True), start=1):
            forged = control.spelled_by_user(message) or control.forged_in(ids, tokens(control.neutral(chat)))
            if forged:
                which = f"prompt {number}" if len(messages) > 1 else "the prompt"
                raise LaunchError(
                    f"{which} has {forged!r}, which the model would read as a token of its chat template, such as one "
                    "that begins a turn: take it out"
                )
        end = turns.end_of_turn()
    finally:
        turns.process.close()
    return ChatPrompts(made, frozenset(number for number, (content, _) in tokenizer.added.items() if content == end))


def _prompt(process: TemplateProcess, chat: Conversation, folder: Path) -> str:
    try:
        return process.render(chat.messages, [ChatPart(1, add_generation_prompt=True)])[0].text
    except TemplateLimit as error:
        raise LaunchError(f"{folder}: its chat template cannot be used, {error}: leave out --chat") from None
    except TemplateRefusal as error:
        raise LaunchError(f"{folder}: its chat template takes no message of a user alone: {error}") from None
