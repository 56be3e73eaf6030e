"""The chat template of a tokenizer: a Jinja program, and the names of special tokens that it may use."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


@dataclass(frozen=True)
class ChatTemplate:
    """A template as text, so that it can be hashed, and sent to the processes that render with it."""

    folder: str  # of its tokenizer, for sentences
    text: str
    tool_text: str  # for conversations with tools; for most tokenizers the same
    date: str | None  # that the template is told for today's, as 2026-01-31; None: it must not ask
    special_tokens: tuple[tuple[str, str], ...]  # such as ("bos_token", "<s>")

    def digest(self) -> str:
        """Returns the SHA-256 of everything that determines what is rendered."""
        facts = [self.text, self.tool_text, self.special_tokens, *([self.date] if self.date else [])]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def program(self, has_tools: bool) -> str:
        """Returns the template for a conversation with or without tools."""
        return self.tool_text if has_tools else self.text

    def marks_generation(self, has_tools: bool) -> bool:
        """True if the template says by itself what an assistant generates: {% generation %} ... {% endgeneration %}."""
        return _GENERATION.search(self.program(has_tools)) is not None


def read_chat_template(folder: Path, date: str | None) -> ChatTemplate:
    """Reads the template of a tokenizer's folder. Raises DataError if there is none, or transformers cannot load it."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the files lead it to
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{folder}: transformers cannot load its tokenizer, and so no chat template ({reason}): save it again with "
            "save_pretrained, or copy its files from the model's source"
        ) from None
    if not tokenizer.chat_template:
        raise DataError(
            f"{folder}: its tokenizer has no chat template: give the tokenizer of a model that was made for chats, or "
            "write one into chat_template.jinja"
        )
    return chat_template_of(tokenizer, folder, date)


def chat_template_of(tokenizer: Any, folder: Path, date: str | None) -> ChatTemplate:
    """Returns the template of transformers' `tokenizer`, which has one. Raises DataError if it has several unnamed."""
    try:
        text, tool_text = tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[])
    except ValueError as error:
        raise DataError(f"{folder}: its chat template cannot be used: {' '.join(str(error).split())}") from None
    return ChatTemplate(str(folder), text, tool_text, date, tuple(tokenizer.special_tokens_map.items()))
