"""The JSON Schema of configs says what loading a config says, as far as JSON Schema can."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from megalite.config import Config
from megalite.config.deepspeed import PASSED_ON, REORDERING, refused_keys
from megalite.config.documentation.option_docs import facts_of
from megalite.config.documentation.schema import json_schema
from megalite.config.suggestions import NAME, NUMBER, OptionPath, option_paths
from tests.unit.megalite.config.conftest import MINIMAL

OPTIONS = [path for path in option_paths(Config) if path != ("deepspeed",)]
AROUND: dict[OptionPath, dict[str, Any]] = {  # required around options of a section
    ("model", "rope_scaling"): {"rope_type": "linear", "factor": 2.0},
    ("sources", NAME): {"path": "a"},
}

NUMBERS = [-1, 0, 1, 2, 3, 4, 7, 10**12, -0.5, 0.0, 0.25, 0.5, 0.51, 0.999, 1.0, 1.5, 6.0, 1e-8]
OTHERS = [None, True, False, "", "auto", "text", "off", "adamw", "fp32", "1e-3", "12", "no"]
NAMED = [{}, {"zebra": 1}, {"": 1}, {"a\n": 0}]
LISTS = [[], [0], [0.5], [0.9, 0.95], [0.9, 1.0], [0.9, 0.9, 0.9], ["a"], ["a", ""], [-1], [None], ["full_attention"]]
VALUES = [*NUMBERS, *OTHERS, *NAMED, *LISTS]


@cache
def validator() -> Draft202012Validator:
    return Draft202012Validator(json_schema())


def config_with(path: OptionPath, value: Any) -> dict[str, Any]:
    """The minimal config with one option set."""
    config: dict[str, Any] = yaml.safe_load(MINIMAL)
    here: Any = config
    for name, following in pairwise(path):
        if name == NUMBER:
            here.append({})
            here = here[0]
        else:
            here = here.setdefault(name, [] if following == NUMBER else dict(AROUND.get((*path[:-2], name)[-2:], {})))
    here[path[-1]] = value
    return config


def loads(config: dict[str, Any]) -> Config | None:
    try:
        return Config.model_validate(copy.deepcopy(config))
    except ValidationError:
        return None


def is_spelling(value: Any) -> bool:
    """Whether it may be taken for another value: text for a number or a truth value, 0 and 1 for false and true."""
    return isinstance(value, str) or value in (0, 1) or (isinstance(value, list) and any(map(is_spelling, value)))


def check_agreement(path: OptionPath, value: Any) -> None:
    """Fails where the schema accepts what loading refuses, or the other way round but for spellings."""
    config = config_with(path, value)
    loaded, is_valid = loads(config), validator().is_valid(config)
    name = f"{'.'.join(path)}: {value!r}"
    assert loaded is not None or not is_valid, f"the schema accepts {name}, which is refused on loading"
    if loaded is not None:
        loaded_as = loaded.model_dump(mode="json")
        for part in path:
            loaded_as = loaded_as[0 if part == NUMBER else part]
        assert validator().is_valid(config_with(path, loaded_as)), f"the schema refuses {loaded_as}, loaded from {name}"
        assert is_valid or is_spelling(value), f"the schema refuses {name}, which loads"


@pytest.mark.parametrize("section", dict.fromkeys(path[0] for path in OPTIONS))
def test_schema_and_loading_agree_about_every_option(section: str) -> None:
    """A bound under a name that JSON Schema does not know, such as `ge`, would be seen here for each option."""
    for path in OPTIONS:
        if path[0] == section:
            for value in VALUES:
                check_agreement(path, value)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    path=st.sampled_from(OPTIONS),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-5, 10**9) | st.floats(-1e15, 1e15) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_schema_and_loading_agree_about_any_value(path: OptionPath, value: Any) -> None:
    check_agreement(path, value)


def test_every_bound_is_one_of_json_schema() -> None:
    """Just outside and on each bound of each number; that a schema has bounds at all is counted."""
    bounds = 0
    for path, schema in options_in(json_schema()):
        for kind in (schema, *schema.get("anyOf", ())):
            for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
                if word in kind:
                    bounds += 1
                    step = 1 if kind["type"] == "integer" else 1e-9
                    for value in (kind[word] - step, kind[word], kind[word] + step):
                        check_agreement(path, value)
    assert bounds > 70, bounds


def options_in(schema: dict[str, Any]) -> Iterator[tuple[OptionPath, dict[str, Any]]]:
    for node in (schema, *schema["$defs"].values()):
        for option in node["properties"].values():
            yield tuple(option["title"].split(".")), option


def test_schema_is_valid_and_names_every_option() -> None:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema" and schema["$id"]
    found = dict(options_in(schema))
    assert set(found) == set(option_paths(Config))
    assert all(option["description"] for option in found.values())


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"vocab_size": -5}},
        {"data": {"path": "a", "held_out_fraction": 9}},
        {"training": {"global_batch_size": -1, "micro_batch_size": 2, "sequence_length": 3}},
        {"training": {"global_batch_size": 1, "micro_batch_size": 0, "sequence_length": 3}},
        {"training": {"global_batch_size": 1, "sequence_length": 3}},
        {"training": None},
        {"model": None},
        {"modle": {}},
    ],
    ids=str,
)
def test_a_bad_config_is_refused(change: dict[str, Any]) -> None:
    config = yaml.safe_load(MINIMAL)
    config = {**config, **change}
    if isinstance(change.get("model"), dict):
        config["model"] = {**yaml.safe_load(MINIMAL)["model"], **change["model"]}
    assert not validator().is_valid(config) and loads(config) is None


@pytest.mark.parametrize("model", [None, {}, {"embedding_dropout": 0.1}, "left out"])
def test_model_may_be_left_out_where_weights_have_it(model: Any) -> None:
    config = config_with(("training", "initialize_from"), "a/folder")
    config["model"] = model
    if model == "left out":
        del config["model"]
    assert validator().is_valid(config)
    del config["training"]["initialize_from"]
    assert not validator().is_valid(config)


@pytest.mark.parametrize("parallel", ["auto", {"zero_stage": "auto"}, {"tensor_parallel_size": "auto"}])
def test_options_chosen_with_the_layout_may_be_left_out(parallel: Any) -> None:
    config = config_with(("parallel",), parallel)
    del config["training"]["micro_batch_size"]
    assert validator().is_valid(config) and loads(config) is not None
    config["parallel"] = {"data_parallel_size": "auto"}  # that is settled by the number of processes
    assert not validator().is_valid(config) and loads(config) is None


@pytest.mark.parametrize("path", [*refused_keys(), *((name,) for name in sorted(PASSED_ON)), REORDERING], ids=str)
@pytest.mark.parametrize("value", [None, False, True, 2, {}, {"zebra": 1}], ids=str)
def test_schema_and_loading_agree_about_deepspeeds_keys(path: OptionPath, value: Any) -> None:
    config = config_with(("deepspeed", *path), value)
    assert validator().is_valid(config) == (loads(config) is not None), config["deepspeed"]


@pytest.mark.parametrize("value", [None, {}, 3, [], {"zebra": 1}, {"gradient_allreduce_op": "sum"}], ids=str)
def test_schema_and_loading_agree_about_the_section_deepspeed(value: Any) -> None:
    config = config_with(("deepspeed",), value)
    assert validator().is_valid(config) == (loads(config) is not None)


def test_every_option_has_an_example_that_loads() -> None:
    for path in option_paths(Config):
        facts = facts_of(path)
        if facts.is_section and facts.example is None:
            continue
        assert facts.example is not None, f"{'.'.join(path)} has no example: add `examples` to its Field"
        assert loads(config_with(path, facts.example)) is not None, facts.override
