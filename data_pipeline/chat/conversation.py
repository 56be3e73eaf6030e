"""Reads conversations from rows of JSON, in the three forms that chat data is published in.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}], "system": "..."}
    {"prompt": ..., "completion": ...}    lists of messages, or texts, which are a user's and an assistant's message

Every assistant message may carry loss, but those of a prompt do not. Other fields of a row are left out; those of a
message go to the template.
"""

import json
from typing import Any, NamedTuple

from data_pipeline.errors import DataError, first_names

ASSISTANT, USER, SYSTEM = "assistant", "user", "system"
USUAL_ROLES = (SYSTEM, "developer", USER, ASSISTANT, "tool", "function")
CHAT_FIELDS = ("messages", "conversations", "system", "prompt", "completion", "tools")
CALLS = "function_call"  # whose value is JSON: a call of a tool, or a list of them
CALL_FIELDS = ("tool_calls", CALLS)  # of a message, as interfaces write them
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
SENDERS = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": SYSTEM,
    CALLS: ASSISTANT,
    "observation": "tool",
    "tool": "tool",
}
"""The role of each sender of `conversations`, which ShareGPT began and LLaMA-Factory has added calls of tools to."""

Message = dict[str, Any]


class Conversation(NamedTuple):
    """The messages of one row."""

    messages: list[Message]
    tools: list[Any] | None  # descriptions of functions, as JSON
    prompt_messages: int  # how many of the first messages carry no loss

    def as_json(self) -> str:
        """Returns the conversation as a text, from which `conversation_of_json` makes it again."""
        return json.dumps(self, ensure_ascii=False)


def conversation_of_json(text: str) -> Conversation:
    return Conversation(*json.loads(text))


def conversation_of_row(fields: dict[str, Any], where: str) -> Conversation:
    """Reads a row. Raises DataError for what is no conversation in text; `where` names the row."""
    tools = fields.get("tools")
    if isinstance(tools, str):  # columns of one type hold them so
        tools = _parsed(tools or "null", tools)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where} has no list of JSON objects in 'tools': describe each function by one")
    messages, prompt_messages = _of_any_form(fields, where)
    for number, message in enumerate(messages[prompt_messages:], start=prompt_messages + 1):
        if message["role"] != ASSISTANT:
            continue
        if not message.get("content", "").strip() and not any(map(message.get, (*CALL_FIELDS, *REASONING_FIELDS))):
            raise DataError(f"{where}, message {number} is an empty answer: leave the conversation out")
        if message.get("weight", 1) != 1:
            raise DataError(
                f"{where}, message {number} has the weight {message['weight']!r}, but every answer carries loss alike: "
                "leave the conversation out, or make the messages up to it the prompt of a completion"
            )
    if not any(message["role"] == ASSISTANT for message in messages[prompt_messages:]):
        roles = {message["role"] for message in messages}
        others = first_names(sorted(map(repr, roles.difference(USUAL_ROLES))))
        remedy = f"name the roles {USER!r} and {ASSISTANT!r}, not {others}" if others else "leave the conversation out"
        raise DataError(f"{where} has no message of an assistant to learn from: {remedy}")
    return Conversation(messages, tools or None, prompt_messages)


def _of_any_form(fields: dict[str, Any], where: str) -> tuple[list[Message], int]:
    """Returns the messages of a row, and how many of the first are a prompt."""
    prompt = fields.get("prompt")
    there = [name for name in ("messages", "conversations", "completion") if fields.get(name) is not None]
    forms = [name for name in there if fields[name]] or there[:1]  # tables have empty values where a row has none
    if not forms or (forms == ["completion"] and prompt is None):
        raise DataError(
            f"{where} holds no conversation (it has {first_names([repr(name) for name in fields]) or 'no fields'}): "
            'write {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "completion": "..."}'
        )
    if len(forms) > 1:
        raise DataError(f"{where} has both {forms[0]!r} and {forms[1]!r}: leave out the one that is not meant")
    if forms == ["completion"]:
        before = _side(prompt, "prompt", USER, where)
        return before + _side(fields["completion"], "completion", ASSISTANT, where), len(before)
    if forms == ["messages"]:
        messages = _messages(fields["messages"], "messages", where)
    else:
        messages = _shared(fields["conversations"], fields.get("system"), where)
    if prompt:  # data sets repeat the first message in a column
        same = [message for message in messages if message["role"] == USER or not isinstance(prompt, str)]
        repeated = _side(prompt, "prompt", USER, where)
        if same[: len(repeated)] != repeated:
            raise DataError(
                f"{where} has a 'prompt' that its {forms[0]!r} do not begin with: leave it out, or make the rest the "
                "'completion'"
            )
    return messages, 0


def _shared(value: Any, system: Any, where: str) -> list[Message]:
    """Returns the messages of `conversations`: each has the fields from and value, or role and content."""
    if not isinstance(value, list):
        raise DataError(f"{where} has {type(value).__name__} in 'conversations': it must hold a list of messages")
    others = [n for n, message in enumerate(value, 1) if isinstance(message, dict) and message.get("from") is not None]
    if others and len(others) < len(value):
        other = next(number for number in range(1, len(value) + 1) if number not in others)
        raise DataError(
            f"{where} has messages of two forms: number {others[0]} has 'from', number {other} has not: give all "
            "'from' and 'value', or all 'role' and 'content'"
        )
    if others:
        value = [_renamed(message, f"{where}, message {number}") for number, message in enumerate(value, start=1)]
    messages = _messages(value, "conversations", where)
    if not system:
        return messages
    first = _message({"role": SYSTEM, "content": system}, f"{where}, 'system'")
    if messages and messages[0]["role"] == SYSTEM:
        raise DataError(f"{where} has 'system' and a message of the system: leave one of them out")
    return [first, *messages]


def _renamed(message: dict[str, Any], where: str) -> Message:
    """Returns a message of the form {"from": "human", "value": "..."}, as ShareGPT has it, in the form with roles."""
    sender, value = message["from"], message.get("value")
    role = SENDERS.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise DataError(f"{where} is from {sender!r}: write one of {', '.join(SENDERS)}")
    if not isinstance(value, str):
        raise DataError(f"{where} has no text in 'value': write one")
    rest = {name: field for name, field in message.items() if name not in ("from", "value")}
    if sender != CALLS:
        return rest | {"role": role, "content": value}
    calls = _parsed(value)
    return rest | {"role": role, "tool_calls": calls if isinstance(calls, list) else [calls]}


def _side(value: Any, field: str, role: str, where: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, field, where)


def _messages(value: Any, field: str, where: str) -> list[Message]:
    if not isinstance(value, list):
        raise DataError(f"{where} has {type(value).__name__} in {field!r}: it must hold a list of messages")
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1)]


def _message(value: Any, where: str) -> Message:
    """Returns a message without its empty fields, its content as one text and arguments of its tool calls as objects.

    A template would write a list of texts, or a text of JSON, as if they were Python or text of their own.
    """
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f'{where} is not of the form {{"role": "...", "content": "..."}}: rename its fields')
    message = {name: content for name, content in value.items() if content is not None}
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise DataError(f"{where} has content that is not text: leave out its conversation")
        message["content"] = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise DataError(f"{where} has {type(content).__name__} as content: it must be a text")
    elif content is None and not message.get("tool_calls"):
        raise DataError(f"{where} has neither content nor tool calls: give it one")
    if not isinstance(message.get("tool_calls", []), list):
        raise DataError(f"{where} has {type(message['tool_calls']).__name__} in 'tool_calls': write a list of calls")
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(call, where) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any, where: str) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f'{where} has a tool call without a function: write {{"function": {{"name": "..."}}}}')
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    parsed = _parsed(arguments)
    if not isinstance(parsed, dict):
        raise DataError(f"{where} has a tool call whose arguments are no JSON object: write one")
    with_object = function | {"arguments": parsed}
    return call | {"function": with_object} if "function" in call else with_object


def _parsed(text: str, otherwise: Any = None) -> Any:
    """Returns what a text holds as JSON, or `otherwise`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
