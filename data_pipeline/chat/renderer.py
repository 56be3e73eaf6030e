"""Renders conversations with a chat template, in a process of its own with limits on time and memory.

A chat template is a program by whoever made the model. Jinja's sandbox keeps it from files and from Python's objects,
but not from running without end or filling the memory, and a thread that does so cannot be stopped. One process
renders any number of conversations, one after another; its limits are for each of them.
"""

import gc
import json
import os
import resource
import select
import signal
import time
import weakref
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.chat.template import ChatTemplate

PROCESSOR_S = 5.0  # for a conversation; a template takes milliseconds
PATIENCE_S = 30.0  # for a process that does not get a processor
MEMORY_BYTES = 1 << 30  # more than the process has at its start
ADDED_CHARACTERS = 1_000_000  # by a template, to all it is given
REASON_CHARACTERS = 300
_CHUNK_BYTES = 1 << 16


class TemplateRefusal(Exception):
    """Raised for a conversation that a template does not render. The text says why: "it takes more than ..."."""


class TemplateLimit(TemplateRefusal):
    """Raised for a template whose process ran too long, or broke."""


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
        self._child: _Child | None = None

    def render(
        self, messages: Sequence[Any], renderings: Sequence[ChatPart], tools: Sequence[Any] | None = None
    ) -> list[Rendered]:
        """Renders parts of one conversation. Raises TemplateRefusal, whose text is a clause about the template."""
        request = json.dumps([messages, renderings, tools]).encode() + b"\n"
        self._child = self._child or _Child(self._template)
        answer = self._child.ask(request)
        if answer is None:
            why = self._child.end()
            self._child = None
            raise TemplateLimit(why)
        rendered, refusal = json.loads(answer)
        if refusal:
            raise TemplateRefusal(refusal)
        return [Rendered(text, [(begin, end) for begin, end in generated]) for text, generated in rendered]

    def close(self) -> None:
        """Ends the process."""
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """The forked process, with pipes to and from it: a line of JSON asks, a line answers."""

    def __init__(self, template: ChatTemplate) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        request_reader, self._requests = os.pipe()
        self._answers, answer_writer = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            try:
                _serve(template, render_jinja_template, request_reader, answer_writer)
            finally:
                os._exit(0)
        os.close(request_reader)
        os.close(answer_writer)
        self._status: list[int] = []
        pipes = (self._requests, self._answers)
        self._end = weakref.finalize(self, _end_process, self._process, pipes, self._status)

    def ask(self, request: bytes) -> bytes | None:
        """Returns the answer; None if the process ended instead, or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            while request:
                request = request[os.write(self._requests, request) :]
        except BrokenPipeError:
            return None
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._answers, _CHUNK_BYTES) if ready else b""
            if not part:
                return None
            parts.append(part)
        return b"".join(parts)

    def end(self) -> str:
        """Ends the process. Returns why it gave no answer, if it was asked for one."""
        self._end()
        (status,) = self._status
        ended = os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGPROF, signal.SIGKILL)
        return "its process broke" if ended else f"it did not end within {PROCESSOR_S:g} s"


def _end_process(process: int, pipes: tuple[int, int], status: list[int]) -> None:
    for pipe in pipes:
        os.close(pipe)
    os.kill(process, signal.SIGKILL)
    status.append(os.waitpid(process, 0)[1])


def _serve(template: ChatTemplate, render: Any, requests: int, answers: int) -> None:
    """Answers requests until there are no more; runs in the forked process."""
    from jinja2.defaults import DEFAULT_NAMESPACE
    from jinja2.filters import FILTERS
    from transformers.utils import chat_template_utils

    os.dup2(requests, 0)
    os.dup2(answers, 1)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # the parent's lock and pipes must not outlive it
    gc.freeze()  # what came with the fork stays in memory that is shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and with it the requests
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    FILTERS["random"] = DEFAULT_NAMESPACE["lipsum"] = _refuse_chance
    chat_template_utils.datetime = _ChosenDate(template.date)  # of strftime_now; in this process alone
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY_BYTES)
    with os.fdopen(0, "rb") as lines:
        for line in lines:
            signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)  # of the processor's time; its signal ends the process
            answer = _answer(template, render, line)
            signal.setitimer(signal.ITIMER_PROF, 0)
            while answer:
                answer = answer[os.write(1, answer) :]


def _answer(template: ChatTemplate, render: Any, line: bytes) -> bytes:
    """Returns what is rendered, or a clause that says why nothing is, as a line of JSON."""
    rendered: list[Rendered] = []
    refusal = ""
    try:
        messages, renderings, tools = json.loads(line)
        program = template.program(tools is not None)
        for stop, add_generation_prompt in renderings:
            texts, generated = render(
                [messages[:stop]],
                tools=tools,
                chat_template=program,
                return_assistant_tokens_mask=template.marks_generation(tools is not None),
                add_generation_prompt=add_generation_prompt,
                **dict(template.special_tokens),
            )
            rendered.append(Rendered(texts[0], generated[0] if generated else []))
            texts[0].encode()  # half a surrogate pair is no text
        if any(len(one.text) > len(line) + ADDED_CHARACTERS for one in rendered):
            refusal = f"it adds more than {ADDED_CHARACTERS:,} characters"
        else:
            return json.dumps([rendered, ""]).encode() + b"\n"
    except MemoryError:
        refusal = f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"
    except BaseException as error:  # a template is a program that may raise anything
        refusal = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
    return json.dumps([[], refusal]).encode() + b"\n"


class _ChosenDate(NamedTuple):
    """A clock that always shows the date that was chosen."""

    date: str | None

    def now(self) -> datetime:
        if self.date is None:
            raise ValueError("it writes today's date: choose one with --chat-date")
        return datetime.fromisoformat(self.date)


def _refuse_chance(*_: Any, **__: Any) -> str:
    raise ValueError("it chooses at random, so that no two renderings would be the same")


def _limit(of: int, most: int) -> None:
    hard = resource.getrlimit(of)[1]
    resource.setrlimit(of, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int:
    """Returns the bytes of addresses that this process has mapped; the limit on addresses counts from none."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
