"""A row that is no conversation in text is one sentence with its place; what a template would garble does not pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_pipeline.chat.conversation import conversation_of_json, conversation_of_row
from data_pipeline.errors import DataError

ANSWER = {"role": "assistant", "content": "yes"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another form": ({"conversations": [], "id": 1}, "holds no conversation (it has 'conversations', 'id'): write"),
    "half a pair": ({"prompt": "a"}, "holds no conversation"),
    "no list": ({"messages": "hi"}, "has str in 'messages'"),
    "other names": ({"messages": [{"from": "human", "value": "hi"}]}, "message 1 is not of the form"),
    "no assistant": ({"messages": [{"role": "user", "content": "hi"}]}, "has no message of an assistant"),
    "assistant in the prompt alone": ({"prompt": [ANSWER], "completion": []}, "has no message of an assistant"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "content that is not text"),
    "a number": ({"messages": [{"role": "user", "content": 4}, ANSWER]}, "has int as content"),
    "nothing": ({"messages": [{"role": "user"}, ANSWER]}, "neither content nor tool calls"),
    "arguments": ({"messages": [CALL]}, "arguments are no JSON object"),
    "a call of nothing": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "without a function"),
    "calls that are no list": ({"messages": [ANSWER | {"tool_calls": 5}]}, "has int in 'tool_calls': write a list"),
    "no loss": ({"messages": [ANSWER, ANSWER | {"weight": 0}]}, "message 2 has the weight 0, but every answer carries"),
    "tools": ({"messages": [ANSWER], "tools": "f(x)"}, "no list of JSON objects in 'tools'"),
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
