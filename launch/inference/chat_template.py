"""Puts messages into a tokenizer's chat template, in a process of its own with limits on time and memory.

A chat template is a program by whoever made the model. Jinja's sandbox keeps it from files and from Python's objects,
but not from running without end or filling the memory, and a thread that does so cannot be stopped.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.errors import LaunchError

PROCESSOR_S = 5  # of the process; a template takes milliseconds
PATIENCE_S = 30.0  # for a process that does not get a processor
MEMORY_BYTES = 1 << 30  # more than this process has
ADDED_CHARACTERS = 1_000_000  # by a template, to all messages
REASON_CHARACTERS = 300
CHUNK_BYTES = 1 << 16


def render_chats(tokenizer: Any, messages: Sequence[str], folder: Path) -> list[str]:
    """Returns each message, as a user's only one, in the words of the chat template of transformers' `tokenizer`.

    folder: of the model, for sentences. Raises LaunchError if there is no template, if it refuses the messages, or if
    it takes more than the limits above.
    """
    if not tokenizer.chat_template:
        raise LaunchError(f"{folder}: its tokenizer has no chat template: leave out --chat")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _render(tokenizer, messages, writer)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        answer = _read(reader)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answer is None:
        ended = os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGXCPU, signal.SIGKILL)
        why = "its process broke" if ended else f"it did not end within {PROCESSOR_S} s"
        raise LaunchError(f"{folder}: its chat template cannot be used, {why}: leave out --chat")
    rendered, refusal = json.loads(answer)
    if refusal:
        raise LaunchError(f"{folder}: its chat template takes no message of a user alone: {refusal}")
    return [str(text) for text in rendered]


def _render(tokenizer: Any, messages: Sequence[str], writer: int) -> None:
    """Writes the rendered messages, or why there are none, as JSON to the pipe; runs in the forked process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, PROCESSOR_S)
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY_BYTES)
    rendered, refusal = [], ""
    try:
        for message in messages:
            chat = [{"role": "user", "content": message}]
            rendered.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        "".join(rendered).encode()  # half a surrogate pair is no text
        if sum(map(len, rendered)) > sum(map(len, messages)) + ADDED_CHARACTERS:
            refusal = f"it adds more than {ADDED_CHARACTERS:,} characters"
    except MemoryError:
        refusal = f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"
    except BaseException as error:  # a template is a program that may raise anything
        refusal = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
    answer = json.dumps([[] if refusal else rendered, refusal]).encode()
    while answer:
        answer = answer[os.write(writer, answer) :]


def _limit(of: int, most: int) -> None:
    hard = resource.getrlimit(of)[1]
    resource.setrlimit(of, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int:
    """Returns the bytes of addresses that this process has mapped; the limit on addresses counts from none."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _read(pipe: int) -> bytes | None:
    """Returns what is written to the pipe until it closes; None if that is nothing, or takes too long."""
    parts: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        if not (part := os.read(pipe, CHUNK_BYTES)):
            return b"".join(parts) or None
        parts.append(part)
