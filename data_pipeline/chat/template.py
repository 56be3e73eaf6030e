"""The chat template of a tokenizer: a Jinja program, and the names of special tokens that it may use."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.folder_checks import TOKENIZER_CONFIG, configuration
from data_pipeline.tokenizers.reading import HubTokenizer

_TEMPLATE = "chat_template.jinja"
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

    def place(self) -> Path:
        """Returns the file that probably has the template."""
        folder = Path(self.folder)
        return folder / (_TEMPLATE if (folder / _TEMPLATE).is_file() else TOKENIZER_CONFIG)

    def program(self, has_tools: bool) -> str:
        """Returns the template for a conversation with or without tools."""
        return self.tool_text if has_tools else self.text

    def marks_generation(self, has_tools: bool) -> bool:
        """True if the template says by itself what an assistant generates: {% generation %} ... {% endgeneration %}."""
        return _GENERATION.search(self.program(has_tools)) is not None


def read_chat_template(folder: Path, date: str | None) -> ChatTemplate:
    """Reads the template of a tokenizer's folder. Raises DataError if there is none, or transformers cannot load it."""
    with HubTokenizer(folder) as tokenizer:
        return chat_template_of(tokenizer, date)


def chat_template_of(tokenizer: HubTokenizer, date: str | None) -> ChatTemplate:
    """Returns the template of a tokenizer. Raises DataError if it has none."""
    if tokenizer.templates is None:
        for name in ("chat_template.json", "processor_config.json"):  # of processors for images and sound
            if configuration(tokenizer.folder / name).get("chat_template"):
                raise DataError(
                    f"{tokenizer.folder / name} has a chat template in 'chat_template', and its tokenizer has none: "
                    f"copy that text into {_TEMPLATE} beside it"
                )
        raise DataError(
            f"{tokenizer.folder}: its tokenizer has no chat template: give the tokenizer of a model that was made for "
            "chats, or write one into chat_template.jinja"
        )
    text, tool_text = tokenizer.templates
    return ChatTemplate(str(tokenizer.folder), text, tool_text, date, tuple(tokenizer.special_tokens.items()))
