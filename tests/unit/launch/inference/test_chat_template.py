"""A chat template is a program of the model's author: whatever it does, it ends in text or in one sentence, soon."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import LaunchError
from launch.inference import chat_template
from launch.inference.chat_template import render_chats

FOLDER = Path("model")


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


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
    assert render_chats(tokenizer, ["x" * 3_000_000], FOLDER)[0].count("x") == 3_000_000  # more than a pipe holds


LOOP = "{% for a in range(99999) %}"
NO_MESSAGE = "takes no message of a user alone"
HARM = {
    "no end": (3 * LOOP + 3 * "{% endfor %}", "did not end within 1 s"),
    "all memory": ("{{ ('a' * 10**10) | length }}", "takes more than 1 GiB of memory"),
    "much text": ("{{ 'a' * 10**7 }}", "adds more than 1,000,000 characters"),
    "half a pair": ("{{ '\\ud800' }}", "surrogates not allowed"),
    "its own words": ("{{ raise_exception('\\n  no\\n' * 1000) }}", f"{NO_MESSAGE}: no no no"),
    "no template": ("{% for %}", NO_MESSAGE),
    "too deep": ("{{ " + "(" * 9_000 + " }}", NO_MESSAGE),
    "Python": ("{{ messages.__class__.__mro__ }}", f"{NO_MESSAGE}: access to attribute '__class__'"),
}


@pytest.mark.parametrize("case", HARM)
def test_a_harmful_template_is_one_sentence(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, sentence = HARM[case]
    monkeypatch.setattr(chat_template, "PROCESSOR_S", 1)
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LaunchError, match=sentence) as caught:
        render_chats(tokenizer_with(template), ["a"], FOLDER)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert time.monotonic() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_tokenizer_without_a_template_is_told_so() -> None:
    with pytest.raises(LaunchError, match="its tokenizer has no chat template: leave out --chat"):
        render_chats(tokenizer_with(None), ["a"], FOLDER)


PARTS = (
    *(
        "{{ ",
        " }}",
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if ",
        " %}",
        "messages",
        "[0]",
        ".content",
        " | tojson",
    ),
    *(
        " * 9",
        "'a'",
        "\x1b]0;",
        "\ud800",
        "{%- set x = ",
        "{#",
        "#}",
        "raise_exception(",
        ")",
        "(",
        "None",
        " + ",
        "\n",
    ),
)


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_any_template_is_text_or_a_sentence(template: str) -> None:
    try:
        (text,) = render_chats(tokenizer_with(template), ["a"], FOLDER)
    except LaunchError as error:
        assert "\n" not in str(error)
    else:
        text.encode()
