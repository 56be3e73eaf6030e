"""Promises over all options and all numbers, not examples."""

from __future__ import annotations

import re
import string
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megalite.config import Config, ConfigError, load_config, resolve_layout, wanted_world_size
from megalite.config.suggestions import NUMBER, option_paths
from megalite.config.yaml_text import parse_yaml, to_yaml
from tests.helpers.commands import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
OPTIONS = [path for path in option_paths(Config) if NUMBER not in path]  # an override names no item of a list
PRINTABLE = st.characters(exclude_categories=["C", "Zl", "Zp"])
LETTERS = string.ascii_lowercase + "_"

quick = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def one_edit(draw: st.DrawFn, word: str) -> str:
    """`word` with one letter too many, too few, another one, or two neighbours swapped."""
    at = draw(st.integers(0, len(word) - 1))
    letter = draw(st.sampled_from(LETTERS))
    return draw(
        st.sampled_from(
            [
                word[:at] + letter + word[at:],
                word[:at] + word[at + 1 :],
                word[:at] + letter + word[at + 1 :],
                word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],
            ]
        )
    )


@quick
@given(option=st.sampled_from(OPTIONS), data=st.data())
def test_a_typo_is_answered_with_the_option(minimal: Path, option: tuple[str, ...], data: st.DataObject) -> None:
    typo = (*option[:-1], data.draw(one_edit(option[-1])))
    assume(typo[-1] and typo not in OPTIONS)
    try:
        load_config(minimal, [f"{'.'.join(typo)}=1"])
    except ConfigError as error:
        assert f'"{".".join(typo)}": did you mean "{".".join(option)}"?' in str(error)
    else:
        raise AssertionError(f"{typo} was accepted")


@quick
@given(st.text(PRINTABLE) | st.floats(allow_nan=False) | st.integers() | st.none() | st.booleans())
def test_yaml_reads_back_what_it_wrote(value: object) -> None:
    assert parse_yaml(to_yaml({"a": [value]}))[0] == {"a": [value]}


@quick
@given(st.from_regex(r"[-+]?[0-9.:_eE]{1,8}", fullmatch=True))
def test_yaml_keeps_text_that_looks_like_a_number(text: str) -> None:
    """1e3 is a number to us and not to PyYAML, 1:30 the other way round."""
    assert parse_yaml(to_yaml({"a": text}))[0] == {"a": text}


@quick
@given(kv=st.integers(1, 8), group=st.integers(1, 6), pairs=st.integers(1, 8), tp=st.integers(1, 64))
def test_the_advised_tensor_parallel_size_works(minimal: Path, kv: int, group: int, pairs: int, tp: int) -> None:
    """A remedy that leads to the next error is no remedy."""
    model = [
        f"model.num_attention_heads={kv * group}",
        f"model.num_key_value_heads={kv}",
        f"model.head_dim={2 * pairs}",
    ]
    try:
        load_config(minimal, [*model, f"parallel.tensor_parallel_size={tp}"])
    except ConfigError as error:
        advice = re.search(r"use a tensor_parallel_size of ([0-9 or]+)$", str(error))
        assert advice, str(error)
        for size in advice[1].split(" or "):
            load_config(minimal, [*model, f"parallel.tensor_parallel_size={size}"])


@quick
@given(batch=st.integers(1, 64), micro=st.integers(1, 9), replicas=st.integers(1, 9))
def test_the_advised_global_batch_works(minimal: Path, batch: int, micro: int, replicas: int) -> None:
    sizes = [f"training.micro_batch_size={micro}", f"parallel.data_parallel_size={replicas}"]
    try:
        load_config(minimal, [*sizes, f"training.global_batch_size={batch}"])
    except ConfigError as error:
        advice = re.search(r"use a global_batch_size of ([0-9 or]+)$", str(error))
        assert advice, str(error)
        for size in advice[1].split(" or "):
            load_config(minimal, [*sizes, f"training.global_batch_size={size}"])


OTHERS = [pytest.param(value, marks=pytest.mark.exhaustive) for value in (str(2**62), "-1", ".inf", ".nan", "1e300")]


@pytest.mark.parametrize("value", ["200000000", *OTHERS])
def test_no_number_of_an_option_fills_the_memory(value: str) -> None:
    """It is refused in a sentence or taken: 200,000,000 pipeline stages have cost 1.6 GB, and more of them a traceback.

    `status` and `ls` read the configs of others' runs.
    """
    tracemalloc.start()
    try:
        for option in OPTIONS:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with suppress(ConfigError):
                config = load_config(QUICKSTART, [f"{'.'.join(option)}={value}"])
                resolve_layout(config, wanted_world_size(config, None), "cpu")
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < 32 << 20, f"{option} takes {taken >> 20} MB"
    finally:
        tracemalloc.stop()
