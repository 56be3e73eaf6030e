"""A row that is no conversation in text is one sentence with its place; what a template would garble does not pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_pipeline.chat.conversation import conversation_of_json, conversation_of_row
from data_pipeline.errors import DataError

ANSWER = {"role": "assistant", "content": "yes"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
ASKED = {"role": "user", "content": "a"}
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "yes"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another form": ({"dialogue": [], "id": 1}, "holds no conversation (it has 'dialogue', 'id'): write"),
    "half a pair": ({"prompt": "a"}, "holds no conversation"),
    "no list": ({"messages": "hi"}, "has str in 'messages'"),
    "other names": ({"messages": [{"from": "human", "value": "hi"}]}, "message 1 is not of the form"),
    "no assistant": ({"messages": [{"role": "user", "content": "hi"}]}, "has no message of an assistant"),
    "other roles": (
        {"messages": [{"role": "human", "content": "hi"}, {"role": "bot", "content": "yes"}]},
        "to learn from: name the roles 'user' and 'assistant', not 'bot', 'human'",
    ),
    "assistant in the prompt alone": ({"prompt": [ANSWER], "completion": []}, "has no message of an assistant"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "content that is not text"),
    "a number": ({"messages": [{"role": "user", "content": 4}, ANSWER]}, "has int as content"),
    "nothing": ({"messages": [{"role": "user"}, ANSWER]}, "neither content nor tool calls"),
    "arguments": ({"messages": [CALL]}, "arguments are no JSON object"),
    "a call of nothing": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "without a function"),
    "calls that are no list": ({"messages": [ANSWER | {"tool_calls": 5}]}, "has int in 'tool_calls': write a list"),
    "no loss": ({"messages": [ANSWER, ANSWER | {"weight": 0}]}, "message 2 has the weight 0, but every answer carries"),
    "tools": ({"messages": [ANSWER], "tools": "f(x)"}, "no list of JSON objects in 'tools'"),
    "two forms": ({"messages": [ANSWER], "completion": "yes"}, "has both 'messages' and 'completion'"),
    "another prompt": ({"messages": [ASKED, ANSWER], "prompt": "b"}, "'prompt' that its 'messages' do not begin with"),
    "no messages": ({"conversations": "hi"}, "has str in 'conversations'"),
    "messages of two forms": ({"conversations": [ASKED, HUMAN, ANSWER]}, "number 2 has 'from', number 1 has not"),
    "no message": ({"conversations": [HUMAN, None]}, "number 1 has 'from', number 2 has not"),
    "a stranger": (
        {"conversations": [HUMAN, {"from": "narrator", "value": ""}]},
        "message 2 is from 'narrator': write",
    ),
    "a sender that is a list": ({"conversations": [{"from": [], "value": ""}]}, "message 1 is from []: write one of"),
    "no value": ({"conversations": [HUMAN | {"value": None}]}, "message 1 has no text in 'value'"),
    "a call that is text": ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, "call without a function"),
    "two systems": (
        {"conversations": [{"from": "system", "value": "x"}, GPT], "system": "y"},
        "has 'system' and a message of the system",
    ),
    "a system that is a number": ({"conversations": [GPT], "system": 4}, "'system' has int as content"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_is_no_conversation_is_refused(case: str) -> None:
    row, sentence = BAD[case]
    with pytest.raises(DataError) as caught:
        conversation_of_row(row, "a.jsonl, line 2")
    assert str(caught.value).startswith("a.jsonl, line 2") and sentence in str(caught.value)


def test_forms_that_mean_the_same_are_one() -> None:
    """Empty fields, as columns of a table have them, parts of text, and JSON within JSON."""
    tool = {"type": "function", "function": {"name": "f"}}
    tidy = conversation_of_row({"messages": [{"role": "user", "content": "ab"}, ANSWER], "tools": [tool]}, "")
    untidy = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            ANSWER | {"tool_calls": None},
        ],
        "tools": json.dumps([tool]),
        "prompt": None,
    }
    assert conversation_of_row(untidy, "") == tidy == conversation_of_json(tidy.as_json())
    weighted = [{"role": "user", "content": "ab", "weight": 0}, ANSWER | {"weight": 0}]
    assert conversation_of_row({"prompt": weighted, "completion": [ANSWER | {"weight": 1}]}, "").prompt_messages == 2
    for no_tools in ([], "[]", "null", "", None):
        assert conversation_of_row({"messages": [ANSWER], "tools": no_tools}, "").tools is None


def test_the_form_of_sharegpt_is_the_same_conversation() -> None:
    """With calls of tools as LLaMA-Factory writes them, and a weight, which must not be lost with the other names."""
    call = {"name": "add", "arguments": {"a": 2}}
    shared = [
        HUMAN,
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "4"},
        {**GPT, "weight": 1},
    ]
    messages = [
        {"role": "system", "content": "s"},
        ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        ANSWER | {"weight": 1},
    ]
    made = conversation_of_row({"conversations": shared, "system": "s", "tools": json.dumps([call])}, "")
    assert made == conversation_of_row({"messages": messages, "tools": [call]}, "")
    first = {"from": "system", "value": "s"}
    assert made.messages == conversation_of_row({"conversations": [first, *shared], "system": ""}, "").messages
    assert made.messages[1:] == conversation_of_row({"conversations": messages[1:]}, "").messages
    with pytest.raises(DataError, match="message 2 has the weight 0"):
        conversation_of_row({"conversations": [HUMAN, GPT | {"weight": 0}]}, "")


def test_a_prompt_beside_messages_may_repeat_their_beginning() -> None:
    """As columns of published data sets do; another one would be left out of the training without a word."""
    messages = [{"role": "system", "content": "s"}, ASKED, ANSWER]
    plain = conversation_of_row({"messages": messages}, "")
    for prompt in ("a", messages[:2], "", []):
        assert conversation_of_row({"messages": messages, "prompt": prompt}, "") == plain
    for prompt in ("b", messages[1:2]):
        with pytest.raises(DataError, match="do not begin with"):
            conversation_of_row({"messages": messages, "prompt": prompt}, "")
    pair = {"prompt": "a", "completion": "yes"}
    assert conversation_of_row(pair | {"messages": [], "conversations": None}, "") == conversation_of_row(pair, "")
