"""A message that is to be answered goes through the template of the model's tokenizer, or the command says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_pipeline.chat import renderer
from launch.errors import LaunchError
from launch.inference.chat_template import render_chats

FOLDER = Path("model")


def tokenizer_with(template: str | None) -> Any:
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    made.chat_template = template
    return made


def test_messages_are_rendered_each_alone() -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_with(template + "{{ 'go' if add_generation_prompt }}")
    assert render_chats(tokenizer, ["a\nb", "naïve 🙂"], FOLDER) == ["<s>[user]a\nbgo", "<s>[user]naïve 🙂go"]


def test_a_template_that_cannot_be_used_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "PROCESSOR_S", 1)
    loop = 3 * "{% for a in range(99999) %}" + 3 * "{% endfor %}"
    for template, sentence in (
        (None, "^model: its tokenizer has no chat template: leave out --chat"),
        ("{{ raise_exception('no') }}", "^model: its chat template takes no message of a user alone: no$"),
        (loop, "^model: its chat template cannot be used, it did not end within 1 s: leave out --chat"),
    ):
        with pytest.raises(LaunchError, match=sentence):
            render_chats(tokenizer_with(template), ["a"], FOLDER)
