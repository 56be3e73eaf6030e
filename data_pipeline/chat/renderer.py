"""Renders conversations with a chat template, in a process of its own with limits on time and memory.

A chat template is a program by whoever made the model. Jinja's sandbox keeps it from files and from Python's objects,
but not from running without end or filling the memory.
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from data_pipeline.chat.template import ChatTemplate
from data_pipeline.limited_process import LimitedProcess, ProcessLimit, ProcessRefusal

PROCESSOR_S = 5.0  # for a conversation; a template takes milliseconds
MEMORY_BYTES = 1 << 30  # more than the process has at its start
ADDED_CHARACTERS = 1_000_000  # by a template, to all it is given


class TemplateRefusal(Exception):
    """Raised for a conversation that a template does not render. The text says why: "it takes more than ..."."""


class TemplateLimit(TemplateRefusal):
    """Raised for a template whose process ran too long, or broke."""


class TemplateBroken(TemplateRefusal):
    """Raised for a template that is no program, or does what none may, whatever the conversation."""


class ChatPart(NamedTuple):
    """The first messages of a conversation to render, up to `stop`, with or without the prompt for an answer."""

    stop: int
    add_generation_prompt: bool


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    generated: list[tuple[int, int]]  # begin and end, in characters, of each {% generation %} block


class TemplateProcess:
    """A process that renders with one template. It starts when it is needed, and ends with this object."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._child: LimitedProcess | None = None

    def render(
        self, messages: Sequence[Any], renderings: Sequence[ChatPart], tools: Sequence[Any] | None = None
    ) -> list[Rendered]:
        """Renders parts of one conversation. Raises TemplateRefusal, whose text is a clause about the template."""
        if self._child is None or self._child.has_ended:
            from transformers.utils import chat_template_utils  # before the fork: the next process needs it too

            self._child = LimitedProcess(
                lambda: _renderer(self._template, chat_template_utils), MEMORY_BYTES, TemplateBroken
            )
        try:
            rendered = self._child.ask([messages, renderings, tools], PROCESSOR_S)
        except ProcessLimit as error:
            # memory is a limit that a conversation meets, time one of the template
            kind = TemplateLimit if self._child.has_ended else TemplateRefusal
            raise kind(str(error)) from None
        except ProcessRefusal as error:
            raise TemplateRefusal(str(error)) from None
        return [Rendered(text, [(begin, end) for begin, end in generated]) for text, generated in rendered]

    def close(self) -> None:
        """Ends the process."""
        if self._child is not None:
            self._child.end()


def _renderer(template: ChatTemplate, library: Any) -> Callable[[Any], list[Rendered]]:
    """Returns the function that answers requests; runs in the forked process alone."""
    from jinja2.defaults import DEFAULT_NAMESPACE
    from jinja2.exceptions import SecurityError, TemplateSyntaxError
    from jinja2.filters import FILTERS

    FILTERS["random"] = DEFAULT_NAMESPACE["lipsum"] = _refuse_chance
    library.datetime = _ChosenDate(template.date)  # of strftime_now

    def render(request: Any) -> list[Rendered]:
        messages, renderings, tools = request
        rendered: list[Rendered] = []
        for stop, add_generation_prompt in renderings:
            try:
                texts, generated = library.render_jinja_template(
                    [messages[:stop]],
                    tools=tools,
                    chat_template=template.program(tools is not None),
                    return_assistant_tokens_mask=template.marks_generation(tools is not None),
                    add_generation_prompt=add_generation_prompt,
                    **dict(template.special_tokens),
                )
            except TemplateSyntaxError as error:
                raise TemplateBroken(f"line {error.lineno}: {error}") from None
            except (SecurityError, OverflowError) as error:  # the second for a range that is too long
                raise TemplateBroken(str(error)) from None
            rendered.append(Rendered(texts[0], generated[0] if generated else []))
            texts[0].encode()  # half a surrogate pair is no text
        longest = max(len(one.text) for one in rendered)
        if longest > ADDED_CHARACTERS and longest > len(json.dumps(request)) + ADDED_CHARACTERS:
            raise ProcessRefusal(f"it adds more than {ADDED_CHARACTERS:,} characters")
        return rendered

    return render


class _ChosenDate(NamedTuple):
    """A clock that always shows the date that was chosen."""

    date: str | None

    def now(self) -> datetime:
        if self.date is None:
            raise ValueError("it writes today's date: choose one with --chat-date")
        return datetime.fromisoformat(self.date)


def _refuse_chance(*_: Any, **__: Any) -> str:
    raise ValueError("it chooses at random, so that no two renderings would be the same")
