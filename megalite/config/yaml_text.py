"""YAML as configs use it: numbers as people write them, no key twice, and where every option stands.

In: text. Out: plain dicts, lists and scalars; or a ConfigError with the line. Unlike in PyYAML's YAML 1.1,
`1e-3` is a number; `no`, `1:30`, `010` and `2024-01-01` are text (a bool option still accepts `no`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from megalite.config.errors import ConfigError

LinePath = tuple[str | int, ...]

NUMBERS_AND_BOOLS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
"""The pattern of plain text that is a number or bool, and the characters it can start with."""

MOST_CHARACTERS = 200_000  # take seconds and 100 MB at worst: lists of single characters
MOST_VALUES = 100_000
"""The largest number of values in a text, each alias counted as the values it repeats: ten levels of ten aliases, in
400 bytes, would be ten thousand million."""

LONGEST_PROBLEM = 300  # characters of PyYAML's words on a syntax error, which repeat what it read

REMEDIES = {
    "could not find expected ':'": "what begins here has no colon: write `option: value`",
    "found unexpected end of stream": "the quote that begins here is not closed",
    "mapping values are not allowed here": "the line above has no colon, this one stands too far right, or text with a "
    "colon needs quotes",
    "found character '\\t'": "indent with spaces, not with tabs",
    "<block end>": "options of one section begin in the same column",
}
"""Remedies for PyYAML's problems; what begins here PyYAML only notices on a later line."""

KEPT_TAGS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")


def _resolvers() -> dict[Any, list[tuple[str, re.Pattern[str]]]]:
    """Returns PyYAML's table (first character -> tags to try) with our numbers in place of YAML 1.1's."""
    table = {
        first: [(tag, pattern) for tag, pattern in entries if tag in KEPT_TAGS]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for name, (pattern, firsts) in NUMBERS_AND_BOOLS.items():
        for first in firsts:
            table.setdefault(first, []).append((f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()


class _Dumper(yaml.SafeDumper):
    """Quotes text that our loader, not PyYAML's, would read as a number."""

    yaml_implicit_resolvers = _resolvers()


def parse_yaml(text: str) -> tuple[Any, dict[LinePath, int]]:
    """Returns the value and the line, counted from 1, of each key. Raises ConfigError with a sentence per problem."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"more than {MOST_CHARACTERS:,} characters: write less")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        if _size(node, {}) > MOST_VALUES:
            raise ConfigError(f"more than {MOST_VALUES:,} values, each alias counted as what it repeats: write fewer")
        problems: list[str] = []
        lines = dict(_key_lines(node, (), problems))
        if problems:
            raise ConfigError(*problems)
        return loader.construct_document(node), lines
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_sentence(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError("not valid YAML: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"not valid YAML: {error}") from None


def to_yaml(values: dict[str, Any]) -> str:
    """Returns YAML in the order given, which `parse_yaml` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110)


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns the number of values in `node`; `known` has the sizes of nodes by id, 0 while they are counted.

    Raises ConfigError for an alias inside the value that it repeats.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if (size := known.get(id(node))) is not None:
        if size == 0:
            line = node.start_mark.line + 1
            raise ConfigError(f"line {line}: an alias contains itself: write out what it stands for")
        return size
    known[id(node)] = 0
    children = (each for child in node.value for each in (child if isinstance(child, tuple) else (child,)))
    known[id(node)] = size = 1 + sum(_size(child, known) for child in children)
    return size


def _key_lines(node: yaml.Node, path: LinePath, problems: list[str]) -> Iterator[tuple[LinePath, int]]:
    """Yields the line of each key; adds a sentence to `problems` for a duplicate key and for one that is no name."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _key_lines(item, (*path, index), problems)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            problems.append(f"line {line}: option names are words, got {key.value!r}")
            continue
        if key.value in seen:
            name = ".".join(map(str, (*path, key.value)))
            problems.append(f"line {line}: {name} stands twice, first on line {seen[key.value]}: remove one of them")
        seen[key.value] = line
        yield (*path, key.value), line
        yield from _key_lines(value, (*path, key.value), problems)


def _syntax_sentence(error: yaml.MarkedYAMLError) -> str:
    remedy = next((remedy for words, remedy in REMEDIES.items() if words in (error.problem or "")), "")
    is_known_late = "begins here" in remedy
    mark = (error.context_mark if is_known_late else None) or error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}: " if mark else ""
    problem = error.problem or error.context or "unreadable"
    if problem.startswith("but ") and error.context:
        problem = f"{error.context}, {problem}"
    return f"{where}not valid YAML: {' '.join(problem.split())[:LONGEST_PROBLEM]}{remedy and f': {remedy}'}"
