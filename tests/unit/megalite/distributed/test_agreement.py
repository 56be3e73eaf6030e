"""Messages between ranks: values come back as they were, anything else is refused and nothing in it runs."""

from __future__ import annotations

import enum
import math
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from megalite.distributed.agreement import LIMIT_BYTES, _adapter, _check_lengths, _decoded, _encoded
from megalite.distributed.errors import MessageRefused


class Colour(enum.Enum):
    RED = "red"


class Entry(BaseModel):
    size: int


@dataclass(frozen=True)
class Inner:
    norms: tuple[tuple[str, float], ...]
    kind: Literal["a", "b"]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    path: Path
    colour: Colour
    count: int
    flag: bool
    data: bytes
    entries: dict[str, Entry]


floats, texts = st.floats(), st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
inners = st.builds(Inner, st.lists(st.tuples(texts, floats), max_size=4).map(tuple), st.sampled_from(["a", "b"]))
OF: dict[Any, st.SearchStrategy[Any]] = {
    Outer: st.builds(
        Outer,
        inners,
        texts.filter(lambda text: "\0" not in text).map(Path),
        st.just(Colour.RED),
        st.integers(),
        st.booleans(),
        st.binary(max_size=20),
        st.dictionaries(texts, st.builds(Entry, size=st.integers(0)), max_size=3),
    ),
    set[Inner]: st.sets(inners, max_size=3),
    tuple[list[bool | None], str | None]: st.tuples(st.lists(st.none() | st.booleans()), st.none() | texts),
    tuple[bool | int | str, ...]: st.lists(st.booleans() | st.integers() | texts).map(tuple),
    Counter[str]: st.dictionaries(texts, st.integers()).map(Counter),
    float: floats,
    int | float: st.integers() | floats,
}


@given(st.sampled_from(list(OF)).flatmap(lambda of: st.tuples(st.just(of), OF[of])))
def test_values_come_back_as_they_were(pair: tuple[Any, Any]) -> None:
    of, value = pair
    found = _decoded(_encoded(value, _adapter(of)), _adapter(of), of, 1)
    assert type(found) is type(value)
    # NaN differs from itself, 1 equals True and 1.0: their texts say which it is
    assert repr(found) == repr(value) if not isinstance(value, set | dict) else len(found) == len(value)
    assert found == value or "nan" in repr(value)


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.marker,)


FOREIGN: dict[str, tuple[Any, bytes]] = {
    "garbage": (str, b"\x93NUMPY\xff\x00"),
    "another type": (list[int], b'[["1"]]'),
    "a bool for an int": (int, b"[true]"),
    "an int for a text": (str, b"[1]"),
    "too much": (Inner, b'[{"norms":[],"kind":"a","more":1}]'),
    "too little": (Inner, b'[{"norms":[]}]'),
    "two values": (int, b"[1,2]"),
    "deep": (list[Any], b"[" * 200_000),
    "a step elsewhere": (Annotated[str, Field(pattern="^step_[0-9]{8,18}$")], b'["step_00000001/../../x"]'),
    "nothing": (None, b""),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_anything_else_is_refused_in_a_sentence_that_names_the_rank(name: str) -> None:
    of, message = FOREIGN[name]
    with pytest.raises(
        MessageRefused, match=r"^rank 3 was to send .* bytes of something else \(.*\): is it a rank"
    ) as refused:
        _decoded(message, _adapter(of), of, 3)
    assert "\n" not in str(refused.value) and "more" not in str(refused.value)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(MessageRefused, match="rank 1 was to send list"):
        _decoded(pickle.dumps(Payload(marker)), _adapter(list[int]), list[int], 1)
    assert not marker.exists()


@given(st.binary(max_size=200), st.sampled_from(list(OF)))
def test_no_bytes_raise_anything_else(message: bytes, of: Any) -> None:
    try:
        _decoded(message, _adapter(of), of, 1)
    except MessageRefused as refused:
        assert str(refused).startswith("rank 1 ")


@pytest.mark.parametrize("length", [1 << 30, LIMIT_BYTES + 1, 0, -2, -(1 << 63)])
def test_a_length_is_refused_before_memory_is_taken_for_it(length: int) -> None:
    with pytest.raises(MessageRefused, match=f"rank 2 was to send int and announced .* {length:,} bytes"):
        _check_lengths({0: 5, 2: length}, int)


@pytest.mark.parametrize("value", [math.nan, "1", object()])
def test_a_value_of_another_type_is_not_sent(value: object) -> None:
    with pytest.raises(ValueError, match=r"Expected `int`|serialize"):
        _encoded(value, _adapter(int))
