"""Puts a user's messages into a tokenizer's chat template, to be answered by a model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from data_pipeline.chat.renderer import ChatPart, TemplateLimit, TemplateProcess, TemplateRefusal
from data_pipeline.chat.template import chat_template_of
from launch.errors import LaunchError


def render_chats(tokenizer: Any, messages: Sequence[str], folder: Path) -> list[str]:
    """Returns each message, as a user's only one, in the words of the chat template of transformers' `tokenizer`.

    folder: of the model, for sentences. Raises LaunchError if there is no template, if it refuses the messages, or if
    it takes more time or memory than the renderer allows.
    """
    if not tokenizer.chat_template:
        raise LaunchError(f"{folder}: its tokenizer has no chat template: leave out --chat")
    process = TemplateProcess(chat_template_of(tokenizer, folder, date.today().isoformat()))
    chats = ([{"role": "user", "content": message}] for message in messages)
    try:
        return [process.render(chat, [ChatPart(1, add_generation_prompt=True)])[0].text for chat in chats]
    except TemplateLimit as error:
        raise LaunchError(f"{folder}: its chat template cannot be used, {error}: leave out --chat") from None
    except TemplateRefusal as error:
        raise LaunchError(f"{folder}: its chat template takes no message of a user alone: {error}") from None
    finally:
        process.close()
