"""A chat template is a program of the model's author: whatever it does, it ends in text or in one sentence, soon."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.chat import renderer
from data_pipeline.chat.renderer import ChatPart, TemplateLimit, TemplateProcess, TemplateRefusal
from data_pipeline.chat.template import ChatTemplate

WHOLE = [ChatPart(1, True)]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def process_with(template: str, date: str | None = None) -> TemplateProcess:
    return TemplateProcess(ChatTemplate("model", template, template, date, (("bos_token", "<s>"),)))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_one_process_renders_many_conversations_and_parts_of_them() -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    process = process_with(template + "{{ 'go' if add_generation_prompt }}{{ tools }}")
    (once,) = process.render(user("a\nb"), WHOLE)
    assert once.text == "<s>[user]a\nbgoNone"
    started = children()
    two = [*user("naïve 🙂"), {"role": "assistant", "content": "ja"}]
    parts = process.render(two, [ChatPart(2, False), ChatPart(1, True)], tools=[{"name": "f"}])
    assert [part.text for part in parts] == [
        "<s>[user]naïve 🙂[assistant]ja[{'name': 'f'}]",
        "<s>[user]naïve 🙂go[{'name': 'f'}]",
    ]
    assert process.render(user("x" * 3_000_000), WHOLE)[0].text.count("x") == 3_000_000  # more than a pipe holds
    assert children() == started
    process.close()


def test_generated_stretches_are_counted_in_characters() -> None:
    process = process_with("🙂{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}")
    (made,) = process.render([*user("né"), *user("b")], [ChatPart(2, False)])
    assert (made.text, made.generated) == ("🙂né.b.", [(1, 3), (4, 5)])
    process.close()


LOOP = "{% for a in range(99999) %}"
HARM = {
    "no end": (3 * LOOP + 3 * "{% endfor %}", TemplateLimit, "did not end within 1 s"),
    "all memory": ("{{ ('a' * 10**10) | length }}", TemplateRefusal, "takes more than 1 GiB of memory"),
    "much text": ("{{ 'a' * 10**7 }}", TemplateRefusal, "adds more than 1,000,000 characters"),
    "half a pair": ("{{ '\\ud800' }}", TemplateRefusal, "surrogates not allowed"),
    "its own words": ("{{ raise_exception('\\n  no\\n' * 1000) }}", TemplateRefusal, "no no no"),
    "no template": ("{% for %}", TemplateRefusal, "."),
    "too deep": ("{{ " + "(" * 9_000 + " }}", TemplateRefusal, "."),
    "the date": (
        "{{ strftime_now('%d %b %Y') }}",
        TemplateRefusal,
        "it writes today's date: choose one with --chat-date",
    ),
    "chance": ("{{ [1, 2] | random }}", TemplateRefusal, "it chooses at random"),
    "words by chance": ("{{ lipsum(1) }}", TemplateRefusal, "it chooses at random"),
    "Python": ("{{ messages.__class__.__mro__ }}", TemplateRefusal, "access to attribute '__class__'"),
}


@pytest.mark.parametrize("case", HARM)
def test_a_harmful_template_is_one_clause_and_the_next_conversation_is_rendered(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for each conversation: a process that lives longer than it is not ended."""
    harm, kind, sentence = HARM[case]
    monkeypatch.setattr(renderer, "PROCESSOR_S", 1)
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    process = process_with("{% if messages[0].content == 'harm' %}" + harm + "{% endif %}fine")
    for _ in range(2):
        with pytest.raises(kind, match=sentence) as caught:
            process.render(user("harm"), WHOLE)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        if case not in ("no template", "too deep"):
            assert process.render(user("a"), WHOLE)[0].text == "fine"
    process.close()
    assert time.monotonic() - started < 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_the_date_is_the_one_that_was_chosen() -> None:
    process = process_with("{{ strftime_now('%d %b %Y') }}", "2024-07-26")
    assert process.render(user("a"), WHOLE)[0].text == "26 Jul 2024"
    process.close()
    dates = [ChatTemplate("model", "", "", date, ()).digest() for date in (None, "2024-07-26", "2024-07-27")]
    assert len(set(dates)) == 3


def test_a_process_ends_with_the_object_that_owns_it() -> None:
    before = children()
    process = process_with("a")
    process.render(user("a"), WHOLE)
    assert len(children() - before) == 1
    del process
    assert children() == before


PARTS = (
    *("{{ ", " }}", "{% for m in messages %}", "{% endfor %}", "{% if ", " %}", "messages", "[0]", ".content"),
    *(" | tojson", " * 9", "'a'", "\x1b]0;", "\ud800", "{%- set x = ", "{#", "#}", "raise_exception(", ")"),
    *("(", "None", " + ", "\n"),
    *("{% generation %}", "{% endgeneration %}"),
)  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_any_template_is_text_or_a_clause(template: str) -> None:
    process = process_with(template)
    try:
        (made,) = process.render(user("a"), WHOLE)
    except TemplateRefusal as error:
        assert "\n" not in str(error)
    else:
        made.text.encode()
    finally:
        process.close()
