"""Text that is made to harm its reader: parsing takes bounded time and memory, and ends in a value or a ConfigError."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import ConfigError
from megalite.config.yaml_text import parse_yaml


def repeated(first: str, level: str) -> str:
    """Eight levels, each of which repeats the one before it ten times."""
    pairs = zip("abcdefg", "bcdefgh", strict=True)
    return f"a: &a {first}\n" + "".join(level.format(name=name, ten=", ".join([f"*{of}"] * 10)) for of, name in pairs)


BOMBS = {
    "aliases of sequences": repeated("[x]", "{name}: &{name} [{ten}]\n"),
    "aliases of mappings": repeated("{x: 1}", "{name}: &{name} {{l: [{ten}]}}\n"),
    "merged mappings": repeated("{x: 1}", "{name}: &{name}\n  <<: [{ten}]\n"),
    "very long text": "a: " + "x" * 200_000,
    "very many values": "a: [" + "a," * 900_000 + "]",
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_bomb_is_one_sentence_at_once(case: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^more than [0-9,]* (values, each alias counted|characters)"):
        parse_yaml(BOMBS[case])
    assert time.monotonic() - started < 2


def test_aliases_within_reason_mean_what_they_repeat() -> None:
    values, lines = parse_yaml("a: &a {x: [1, 2]}\nb:\n  <<: *a\n  y: *a\n")
    assert values == {"a": {"x": [1, 2]}, "b": {"x": [1, 2], "y": {"x": [1, 2]}}}
    assert lines["b", "y", "x"] == 1


def test_a_syntax_error_repeats_a_bounded_part_of_the_text() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml("!" * 100_000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a:\n  b: 1\n  steps 20\n\nc: 1\n", "line 3: .* what begins here has no colon"),
        ("a:\n\tb: 1\n", "line 2: .*: indent with spaces, not with tabs"),
        ('a: "x\nb: 2\n', "line 1: .*: the quote that begins here is not closed"),
    ],
)
def test_a_syntax_error_is_told_where_it_is(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_yaml(text)


PARTS = (
    *("a", "b: ", "&a ", "*a", "<<: ", "- ", "? ", ": ", "[", "]", "{", "}", ", ", "\n", "\n  ", "!!python/name:os "),
    *("!!binary ", "1e3", "'", '"', "\\x1b", "|\n", "---\n", "%YAML 9\n", "\x1b]0;", "\u2028", "#", "\t", "0o9"),
    ".nan",
)


@given(st.lists(st.sampled_from(PARTS), max_size=60).map("".join) | st.text(max_size=200))
def test_any_text_is_a_value_or_a_sentence(text: str) -> None:
    try:
        parse_yaml(text)
    except ConfigError as error:
        assert all(0 < len(sentence) < 1000 for sentence in error.sentences)
